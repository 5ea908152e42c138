//! Addresses of examples that are parts of tensors in files: any number of examples in a file, any number of tensors
//! per example, and rows some bytes apart, because a row of a tensor contains several layers side by side, or because
//! it is a view.
//!
//! For each tensor an example has a file and a byte offset in it; a group is one of the tensors, at an offset in its rows:
//!
//! ```text
//! byte = starts[tensor of the group][example] + offset of the group + token * step of the file
//! ```

use super::spans::PerExample;
use super::{Address, Layout, Run, address_bits, check_example, check_group, check_token, too_far};
use crate::error::{Error, Kind, Result};
use crate::number::to_usize;

/// One tensor of every example.
#[derive(Debug)]
pub struct TensorParts {
    /// File numbers.
    pub files: PerExample<u32>,
    /// The byte of the first row.
    pub starts: Vec<u64>,
}

/// A group: which tensor, and the offset of its elements in the tensor's rows, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct TensorGroup {
    /// Index of the tensor.
    pub tensor: usize,
    /// The offset.
    pub offset: u64,
}

/// The layout. Addresses are byte offsets.
#[derive(Debug)]
pub struct Tensors {
    tokens: Vec<u32>,
    tensors: Vec<TensorParts>,
    groups: Vec<TensorGroup>,
    /// Bytes from one row to the next, by file.
    steps: Vec<u64>,
}

impl Tensors {
    /// Checks that every tensor has a place for every example, in one of the files, and that each byte has an address. Whether
    /// a file contains the rows is checked when they are read.
    pub fn new(
        tokens: Vec<u32>,
        tensors: Vec<TensorParts>,
        groups: Vec<TensorGroup>,
        steps: Vec<u64>,
    ) -> Result<Tensors> {
        let refuse = |what: String| Err(Error::new(Kind::Format, what));
        let examples = tokens.len();
        if groups.is_empty() || groups.iter().any(|group| group.tensor >= tensors.len()) {
            return refuse(format!("expected layers in {} tensors, found {} layers", tensors.len(), groups.len()));
        }
        if let Some(file) = steps.iter().position(|step| *step == 0 || *step >= 1 << 40) {
            return refuse(format!("file {file}: expected rows 1 to 2^40 bytes apart, found {}", steps[file]));
        }
        for (t, tensor) in tensors.iter().enumerate() {
            if tensor.starts.len() != examples || !tensor.files.fits(examples as u64) {
                return refuse(format!("tensor {t}: expected places of {examples} examples, found another number"));
            }
            let offset = groups.iter().filter(|group| group.tensor == t).map(|group| group.offset).max().unwrap_or(0);
            for (example, (start, tokens)) in tensor.starts.iter().zip(&tokens).enumerate() {
                let file = tensor.files.get(example as u64);
                let Some(step) = steps.get(file as usize) else {
                    return refuse(format!("example {example}: expected a file below {}, found {file}", steps.len()));
                };
                let end = step.checked_mul(u64::from(*tokens)).and_then(|n| n.checked_add(*start));
                let end = end.and_then(|n| n.checked_add(offset));
                if end.is_none_or(|end| end >> address_bits(steps.len()) > 0) {
                    let error = too_far(end.unwrap_or(u64::MAX), steps.len());
                    return Err(Error { detail: format!("example {example}: {}", error.detail), ..error });
                }
            }
        }
        Ok(Tensors { tokens, tensors, groups, steps })
    }

    /// For each file, the bytes from one row to the next.
    pub fn steps(&self) -> &[u64] {
        &self.steps
    }

    #[inline]
    fn first(&self, group: usize, example: u64) -> Address {
        let TensorGroup { tensor, offset } = self.groups[group];
        let parts = &self.tensors[tensor];
        Address { file: u64::from(parts.files.get(example)), row: parts.starts[to_usize(example)] + offset }
    }
}

impl Layout for Tensors {
    fn groups(&self) -> usize {
        self.groups.len()
    }

    fn examples(&self) -> u64 {
        self.tokens.len() as u64
    }

    fn tokens(&self, _group: usize, example: u64) -> u64 {
        u64::from(self.tokens[to_usize(example)])
    }

    #[inline]
    fn locate(&self, group: usize, example: i64, token: i64) -> Result<Address> {
        check_group(group, self.groups.len())?;
        let example = check_example(example, self.examples())?;
        let token = check_token(token, self.tokens(group, example), example)?;
        let at = self.first(group, example);
        Ok(Address { row: at.row + token * self.steps[to_usize(at.file)], ..at })
    }

    #[inline]
    fn last(&self, group: usize, example: i64) -> Result<Address> {
        self.locate(group, example, -1)
    }

    fn runs(&self, group: usize, example: i64, each: &mut dyn FnMut(Run)) -> Result<()> {
        check_group(group, self.groups.len())?;
        let example = check_example(example, self.examples())?;
        let rows = self.tokens(group, example);
        if rows > 0 {
            each(Run { at: self.first(group, example), rows });
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Tokens, then file and start of two tensors.
    type Both = (u32, u32, u64, u32, u64);

    fn parts(files: Vec<u32>, starts: Vec<u64>) -> TensorParts {
        TensorParts { files: PerExample::Each(files), starts }
    }

    #[test]
    fn impossible_numbers_are_refused() {
        let group = |tensor, offset| TensorGroup { tensor, offset };
        for (tokens, tensors, groups, steps) in [
            (vec![1], vec![parts(vec![0], vec![0])], vec![], vec![8]),
            (vec![1], vec![parts(vec![0], vec![0])], vec![group(1, 0)], vec![8]),
            (vec![1], vec![parts(vec![1], vec![0])], vec![group(0, 0)], vec![8]),
            (vec![1], vec![parts(vec![], vec![0])], vec![group(0, 0)], vec![8]),
            (vec![1], vec![parts(vec![0], vec![])], vec![group(0, 0)], vec![8]),
            (vec![1], vec![parts(vec![0], vec![0])], vec![group(0, 0)], vec![0]),
            (vec![1], vec![parts(vec![0], vec![0])], vec![group(0, 0)], vec![u64::MAX]),
            (vec![1], vec![parts(vec![0], vec![u64::MAX])], vec![group(0, 0)], vec![8]),
            (vec![1], vec![parts(vec![0], vec![1 << 56])], vec![group(0, 0)], vec![8]),
            (vec![1], vec![parts(vec![0], vec![0])], vec![group(0, u64::MAX)], vec![8]),
            (vec![u32::MAX], vec![parts(vec![0], vec![0])], vec![group(0, 0)], vec![1 << 39]),
        ] {
            let kind = Tensors::new(tokens, tensors, groups, steps).unwrap_err().kind;
            assert!(matches!(kind, Kind::Format | Kind::Unsupported));
        }
    }

    proptest! {
        /// Compares with the formula, computed for every token.
        #[test]
        fn rows_are_where_the_formula_puts_them(
            examples in prop::collection::vec((0u32..5, 0u32..3, 0u64..100, 0u32..3, 0u64..100), 0..6),
            groups in prop::collection::vec((0usize..2, 0u64..50), 1..5),
            steps in prop::array::uniform3(1u64..60),
        ) {
            let column = |f: &dyn Fn(&Both) -> u64| examples.iter().map(f).collect::<Vec<u64>>();
            let files = |f: &dyn Fn(&Both) -> u32| examples.iter().map(f).collect::<Vec<u32>>();
            let tensors = vec![parts(files(&|e| e.1), column(&|e| e.2)), parts(files(&|e| e.3), column(&|e| e.4))];
            let listed = groups.iter().map(|&(tensor, offset)| TensorGroup { tensor, offset }).collect();
            let layout = Tensors::new(files(&|e| e.0), tensors, listed, steps.to_vec()).unwrap();
            prop_assert_eq!((layout.examples(), layout.groups()), (examples.len() as u64, groups.len()));
            for (i, &(tokens, file_a, start_a, file_b, start_b)) in examples.iter().enumerate() {
                for (g, &(tensor, offset)) in groups.iter().enumerate() {
                    let (file, start) = if tensor == 0 { (file_a, start_a) } else { (file_b, start_b) };
                    let step = steps[file as usize];
                    let want: Vec<u64> = (0..u64::from(tokens)).map(|t| start + offset + t * step).collect();
                    for (t, want) in want.iter().enumerate() {
                        let at = layout.locate(g, i as i64, t as i64).unwrap();
                        prop_assert_eq!((at.file, at.row), (u64::from(file), *want));
                    }
                    prop_assert_eq!(layout.tokens(g, i as u64), want.len() as u64);
                    prop_assert!(layout.locate(g, i as i64, want.len() as i64).is_err());
                    prop_assert_eq!(layout.last(g, i as i64).ok().map(|at| at.row), want.last().copied());
                    let mut walked = vec![];
                    layout.runs(g, i as i64, &mut |run| walked.extend((0..run.rows).map(|t| run.at.row + t * step))).unwrap();
                    prop_assert_eq!(&walked, &want);
                }
            }
        }
    }
}
