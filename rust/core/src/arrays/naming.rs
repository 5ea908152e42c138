//! Names of chunk files: `c/0/1`, `c.0.1`, `0/1` or `0.1`, relative to the array's folder.
//!
//! Sources: Zarr core specification 3.0, "Chunk key encoding"; Zarr storage specification 2.0, "Chunks".

use std::fmt::Write;

/// The encoding of chunk indices in file names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Naming {
    prefix: &'static str,
    separator: &'static str,
}

impl Naming {
    /// The default encoding of version 3, separated by `"/"` or `"."`.
    pub fn default_of(slashes: bool) -> Naming {
        if slashes { Naming { prefix: "c/", separator: "/" } } else { Naming { prefix: "c.", separator: "." } }
    }

    /// The encoding of version 2, separated by `"/"` or `"."`.
    pub fn v2(slashes: bool) -> Naming {
        Naming { prefix: "", separator: if slashes { "/" } else { "." } }
    }

    /// The encoding with this prefix and separator; `None` if there is none.
    pub fn of(prefix: &str, separator: &str) -> Option<Naming> {
        let each = [Naming::v2(false), Naming::v2(true), Naming::default_of(false), Naming::default_of(true)];
        each.into_iter().find(|naming| naming.prefix == prefix && naming.separator == separator)
    }

    /// The text before the first index: `""`, `"c/"` or `"c."`.
    pub fn prefix(&self) -> &'static str {
        self.prefix
    }

    /// The separator of indices: `"."` or `"/"`.
    pub fn separator(&self) -> &'static str {
        self.separator
    }

    /// The name of a chunk's file.
    pub fn file(&self, indices: &[u64]) -> String {
        let Some((first, others)) = indices.split_first() else {
            // An array without dimensions has one chunk.
            return if self.prefix.is_empty() { "0".to_string() } else { "c".to_string() };
        };
        let mut name = format!("{}{first}", self.prefix);
        for index in others {
            // Writing to a string cannot fail.
            let _ = write!(name, "{}{index}", self.separator);
        }
        name
    }

    /// The subfolder of the array's folder with its files (`""` for the folder itself), and the prefix of names in it.
    pub fn folder(&self) -> (&'static str, &'static str) {
        match self.prefix.strip_suffix('/') {
            Some(folder) => (folder, ""),
            None => ("", self.prefix),
        }
    }

    /// The first index of a file or subfolder, from its name in [`Naming::folder`]; `None` if it is not a chunk of an array
    /// with `dimensions` dimensions whose other indices are zero.
    pub fn first_index(&self, name: &str, dimensions: usize) -> Option<u64> {
        let mut digits = name.strip_prefix(self.folder().1)?;
        if self.separator == "." {
            for _ in 1..dimensions {
                digits = digits.strip_suffix(".0")?;
            }
        }
        digits.parse::<u64>().ok().filter(|n| n.to_string() == digits)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_specifications() {
        let cases = [
            ("", ".", "7.0", "0", ("", "")),
            ("", "/", "7/0", "0", ("", "")),
            ("c.", ".", "c.7.0", "c", ("", "c.")),
            ("c/", "/", "c/7/0", "c", ("c", "")),
        ];
        for (prefix, separator, file, none, folder) in cases {
            let naming = Naming::of(prefix, separator).unwrap();
            assert_eq!((naming.prefix(), naming.separator()), (prefix, separator));
            assert_eq!(naming.file(&[7, 0]), file);
            assert_eq!(naming.file(&[]), none);
            assert_eq!(naming.folder(), folder);
            // A file name in the folder, or the name of a subfolder.
            let listed = naming.file(&[7, 0]);
            let listed = listed.strip_prefix("c/").unwrap_or(&listed);
            let listed = if separator == "/" { "7" } else { listed };
            assert_eq!(naming.first_index(listed, 2), Some(7));
            for other in ["07", "7.1", "x", "+7", "", "zarr.json"] {
                assert_eq!(naming.first_index(other, 2), None, "{prefix}{separator}{other}");
            }
        }
        assert_eq!(Naming::of("c", "."), None);
        assert_eq!(Naming::of("c.", "/"), None);
    }
}
