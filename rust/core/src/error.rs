//! Errors of the core: one type, one line of text, with the file and the byte offset or field.

use std::any::Any;
use std::fmt;
use std::io;
use std::sync::Arc;

use crate::location::Location;

/// The kind of an error, as a stable code. Append only: Python maps each code to one exception class, and a test compares
/// the two lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A file does not exist.
    NotFound,
    /// The system failed to open, map or read a file.
    Access,
    /// Expected a regular file, found a folder, socket or device.
    NotAFile,
    /// A file is shorter than expected, or shrank after it was opened.
    Truncated,
    /// A file's content contradicts its format or another file of the dataset.
    Format,
    /// A safetensors header is invalid; [`Error::reason`] names the rule.
    Header,
    /// Well formed, but of an unsupported version or element type.
    Unsupported,
    /// An example or token index outside the dataset.
    OutOfRange,
    /// An unsupported element type or conversion.
    DType,
    /// An invalid argument.
    Argument,
    /// The caller's watch requested a stop.
    Interrupted,
    /// A bug in actshard.
    Internal,
    /// A pickle would import, call or build something other than plain data; nothing was executed.
    UnsafePickle,
    /// Well formed, but the dataset does not contain the requested data.
    NotStored,
    /// The disk or the user's quota is full.
    DiskFull,
    /// The dataset is closed.
    Closed,
    /// A dataset or an argument requires more memory than is available.
    NoMemory,
}

impl Kind {
    /// Every kind, in declaration order.
    pub const ALL: [Kind; 17] = [
        Kind::NotFound,
        Kind::Access,
        Kind::NotAFile,
        Kind::Truncated,
        Kind::Format,
        Kind::Header,
        Kind::Unsupported,
        Kind::OutOfRange,
        Kind::DType,
        Kind::Argument,
        Kind::Interrupted,
        Kind::Internal,
        Kind::UnsafePickle,
        Kind::NotStored,
        Kind::DiskFull,
        Kind::Closed,
        Kind::NoMemory,
    ];

    /// The stable code.
    pub fn code(self) -> &'static str {
        match self {
            Kind::NotFound => "not_found",
            Kind::Access => "access",
            Kind::NotAFile => "not_a_file",
            Kind::Truncated => "truncated",
            Kind::Format => "format",
            Kind::Header => "header",
            Kind::Unsupported => "unsupported",
            Kind::OutOfRange => "out_of_range",
            Kind::DType => "dtype",
            Kind::Argument => "argument",
            Kind::Interrupted => "interrupted",
            Kind::Internal => "internal",
            Kind::UnsafePickle => "unsafe_pickle",
            Kind::NotStored => "not_stored",
            Kind::DiskFull => "disk_full",
            Kind::Closed => "closed",
            Kind::NoMemory => "no_memory",
        }
    }
}

/// A dataset fault, more exact than the kind of the error: the code under which `actshard verify` reports it. Append only;
/// a Python test compares the list with the table of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finding {
    /// A field of the metadata is missing or wrong.
    Metadata,
    /// A file is empty.
    EmptyFile,
    /// A file's size differs from the one in the metadata.
    SizeBytes,
    /// A file's checksum differs from the one in the metadata.
    Checksum,
    /// A gzip file or chunk is damaged, or is not gzip data.
    Gzip,
    /// A count in the metadata differs from the number found.
    CountClaim,
    /// A sample number occurs twice.
    DuplicateSample,
}

impl Finding {
    /// Every finding, in declaration order.
    pub const ALL: [Finding; 7] = [
        Finding::Metadata,
        Finding::EmptyFile,
        Finding::SizeBytes,
        Finding::Checksum,
        Finding::Gzip,
        Finding::CountClaim,
        Finding::DuplicateSample,
    ];

    /// The stable code.
    pub fn code(self) -> &'static str {
        match self {
            Finding::Metadata => "metadata",
            Finding::EmptyFile => "empty-file",
            Finding::SizeBytes => "size-bytes",
            Finding::Checksum => "checksum",
            Finding::Gzip => "gzip",
            Finding::CountClaim => "count-claim",
            Finding::DuplicateSample => "duplicate-sample",
        }
    }
}

/// An error. `Display` is one line: `path: byte N: detail`.
#[derive(Clone, Debug, thiserror::Error)]
pub struct Error {
    /// The kind.
    pub kind: Kind,
    /// The file concerned.
    pub location: Option<Location>,
    /// The byte offset in that file.
    pub offset: Option<u64>,
    /// The name of the broken rule, for parsers with named rules.
    pub reason: Option<&'static str>,
    /// The dataset fault, if it is more exact than the kind.
    pub finding: Option<Finding>,
    /// The system's error number, if the system reported one.
    pub errno: Option<i32>,
    /// The expected and the found values, as text.
    pub detail: String,
    /// An error raised by the caller's own callback; this error only carries it back to the caller.
    pub carried: Option<Carried>,
}

/// A foreign error, shared by the clones of an [`Error`] and dropped with them.
#[derive(Clone)]
pub struct Carried(pub Arc<dyn Any + Send + Sync>);

impl fmt::Debug for Carried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Carried")
    }
}

/// The core's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error that concerns no particular file.
    pub fn new(kind: Kind, detail: impl Into<String>) -> Error {
        Error {
            kind,
            location: None,
            offset: None,
            reason: None,
            finding: None,
            errno: None,
            detail: detail.into(),
            carried: None,
        }
    }

    /// Sets the file.
    #[must_use]
    pub fn at(mut self, location: impl Into<Location>) -> Error {
        self.location = Some(location.into());
        self
    }

    /// Sets the byte offset.
    #[must_use]
    pub fn byte(mut self, offset: u64) -> Error {
        self.offset = Some(offset);
        self
    }

    /// Sets the finding.
    #[must_use]
    pub fn finds(mut self, finding: Finding) -> Error {
        self.finding = Some(finding);
        self
    }

    /// An error from the system about a file; `doing` is a verb ("open", "map", "read").
    pub fn from_io(error: &io::Error, location: impl Into<Location>, doing: &str) -> Error {
        let kind = match error.kind() {
            io::ErrorKind::NotFound => Kind::NotFound,
            io::ErrorKind::IsADirectory | io::ErrorKind::NotADirectory => Kind::NotAFile,
            io::ErrorKind::UnexpectedEof => Kind::Truncated,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Kind::DiskFull,
            _ => Kind::Access,
        };
        let detail = match kind {
            Kind::NotFound if doing.contains("write") => {
                format!("cannot {doing}: the parent folder does not exist")
            }
            Kind::NotFound => "expected a file, found nothing".to_string(),
            Kind::NotAFile if error.kind() == io::ErrorKind::NotADirectory => {
                format!("cannot {doing}: expected a folder, found a file, in a parent of this path")
            }
            Kind::NotAFile => "expected a regular file, found a folder".to_string(),
            Kind::DiskFull => format!("cannot {doing}: the disk is full ({error})"),
            _ if error.raw_os_error().is_some_and(is_out_of_descriptors) => {
                format!("cannot {doing}: {error}; raise the limit of open files (`ulimit -n`) or close other files")
            }
            _ => format!("cannot {doing}: {error}"),
        };
        let mut made = Error::new(kind, detail).at(location);
        made.errno = error.raw_os_error();
        made
    }

    /// Whether there is nothing at the error's location. A symbolic link that leads nowhere is something: of a clone without its
    /// contents, or of a cache that was cleared.
    pub(crate) fn is_absence(&self) -> bool {
        // Chunks may lie in nested folders, each of which may be such a link.
        let is_link =
            |path: &std::path::Path| path.ancestors().take(5).any(|above| above.is_symlink() && !above.exists());
        self.kind == Kind::NotFound && !self.location.as_ref().and_then(Location::path).is_some_and(is_link)
    }

    /// Whether the process or the system has run out of file descriptors.
    pub(crate) fn is_out_of_descriptors(&self) -> bool {
        self.errno.is_some_and(is_out_of_descriptors)
    }
}

/// EMFILE and ENFILE have the same numbers on all Unix systems.
pub(crate) fn is_out_of_descriptors(errno: i32) -> bool {
    matches!(errno, 23 | 24)
}

/// Escapes a text from a file so that it fits in one line of a message.
pub(crate) fn in_one_line(text: &str) -> String {
    let mut made = String::with_capacity(text.len());
    // Writing to a String cannot fail.
    let _ = write_escaped(&mut made, text);
    made
}

/// Names, keys and paths come from untrusted files: a line break or a terminal escape in one must not forge a line of a
/// log. U+2028 and U+2029 break lines too.
fn write_escaped(f: &mut impl fmt::Write, text: &str) -> fmt::Result {
    for c in text.chars() {
        if c.is_control() || matches!(c, '\u{2028}' | '\u{2029}') {
            write!(f, "{}", c.escape_default())?;
        } else {
            f.write_char(c)?;
        }
    }
    Ok(())
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(location) = &self.location {
            write_escaped(f, &location.to_string())?;
            f.write_str(": ")?;
        }
        if let Some(offset) = self.offset {
            write!(f, "byte {offset}: ")?;
        }
        write_escaped(f, &self.detail)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn what_files_say_cannot_break_the_line() {
        let error = Error::new(Kind::Header, "unknown dtype 'F\r\n\u{1b}[2J'").byte(9);
        assert_eq!(error.to_string(), "byte 9: unknown dtype 'F\\r\\n\\u{1b}[2J'");
        let error = Error::new(Kind::NotFound, "gone\u{2028}").at(Path::new("/data/a\nb\u{1b}[2J"));
        assert_eq!(error.to_string(), "/data/a\\nb\\u{1b}[2J: gone\\u{2028}");
    }

    #[test]
    fn a_file_in_place_of_a_folder_and_a_folder_that_is_missing_are_named_as_such() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, b"x").unwrap();
        let inside = file.join("inside");
        let error = Error::from_io(&std::fs::File::open(&inside).unwrap_err(), &inside, "open");
        assert_eq!(error.kind, Kind::NotAFile);
        assert!(error.detail.contains("expected a folder, found a file"), "{error}");
        let missing = folder.path().join("none").join("a");
        let error = Error::from_io(&std::fs::File::create(&missing).unwrap_err(), &missing, "open to write");
        assert_eq!(error.kind, Kind::NotFound);
        assert!(error.detail.contains("the parent folder does not exist"), "{error}");
    }
}
