//! Packing of documents into examples: next fit, in order (`formats/levanter.md` 3).

use crate::error::{Error, Kind, Result};

/// The treatment of documents longer than an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overlong {
    /// Keep the beginning, as a separate example.
    Left,
    /// Keep the end, as a separate example.
    Right,
    /// Fail.
    Raise,
    /// Leave the document out.
    Drop,
}

impl Overlong {
    /// `"left"`, `"right"`, `"raise"` or `"drop"`; `None` for any other name.
    pub fn from_name(name: &str) -> Option<Overlong> {
        match name {
            "left" => Some(Overlong::Left),
            "right" => Some(Overlong::Right),
            "raise" => Some(Overlong::Raise),
            "drop" => Some(Overlong::Drop),
            _ => None,
        }
    }
}

/// Assigns documents to examples, given their lengths in order.
#[derive(Debug)]
pub struct Packer {
    most: u64,
    segments: u64,
    overlong: Overlong,
    /// The open example: its first document, and its number of documents.
    open: (u64, u64),
    totals: Vec<u64>,
    next: u64,
    /// First document, and one past the last, of each example.
    packs: Vec<[u64; 2]>,
}

impl Packer {
    /// Examples have at most `most` elements in each of `fields` fields, and at most `segments` documents.
    pub fn new(most: u64, segments: u64, overlong: Overlong, fields: usize) -> Packer {
        Packer { most, segments, overlong, open: (0, 0), totals: vec![0; fields], next: 0, packs: vec![] }
    }

    fn close(&mut self) {
        if self.open.1 > 0 {
            self.packs.push([self.open.0, self.open.0 + self.open.1]);
        }
        self.open = (self.next, 0);
        self.totals.fill(0);
    }

    /// Adds consecutive documents: for each field the start of the first, then the end of each.
    pub fn push(&mut self, bounds: &[Vec<u64>]) -> Result<()> {
        let Some(documents) = bounds.first().map(|b| b.len() - 1) else { return Ok(()) };
        if let [only] = bounds {
            // The common case, which must be fast for ten million documents.
            for pair in only.windows(2) {
                self.put(pair[1] - pair[0])?;
            }
            return Ok(());
        }
        for i in 0..documents {
            let longest = bounds.iter().map(|b| b[i + 1] - b[i]).max().unwrap_or(0);
            if longest > self.most && !self.too_long(longest)? {
                continue;
            }
            let over = bounds.iter().zip(&self.totals).any(|(b, total)| total + (b[i + 1] - b[i]) > self.most);
            if self.open.1 > 0 && (self.open.1 >= self.segments || over) {
                self.close();
            }
            for (total, b) in self.totals.iter_mut().zip(bounds) {
                *total += b[i + 1] - b[i];
            }
            self.took(longest > self.most);
        }
        Ok(())
    }

    #[inline]
    fn put(&mut self, length: u64) -> Result<()> {
        if length > self.most && !self.too_long(length)? {
            return Ok(());
        }
        if self.open.1 > 0 && (self.open.1 >= self.segments || self.totals[0] + length > self.most) {
            self.close();
        }
        self.totals[0] += length;
        self.took(length > self.most);
        Ok(())
    }

    #[inline]
    fn took(&mut self, alone: bool) {
        self.open.1 += 1;
        self.next += 1;
        if alone {
            self.close();
        }
    }

    /// Whether to pack a document longer than an example.
    #[cold]
    fn too_long(&mut self, length: u64) -> Result<bool> {
        match self.overlong {
            Overlong::Left | Overlong::Right => Ok(true),
            Overlong::Drop => {
                self.next += 1;
                self.close();
                Ok(false)
            }
            Overlong::Raise => Err(Error::new(
                Kind::Format,
                format!(
                    "document {} has {length} tokens, more than an example's {}; use slice_strategy 'left' or 'right' to keep a \
                     part of it, or 'drop' to leave it out",
                    self.next, self.most
                ),
            )),
        }
    }

    /// The examples.
    pub fn finish(mut self) -> Vec<[u64; 2]> {
        self.close();
        self.packs
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The rule of `formats/levanter.md`, literally.
    fn naive(fields: &[Vec<u64>], most: u64, segments: u64, drop: bool) -> Vec<[u64; 2]> {
        let n = fields[0].len();
        let over = |i: usize| fields.iter().any(|f| f[i] > most);
        let (mut packs, mut i) = (vec![], 0);
        while i < n {
            if drop && over(i) {
                i += 1;
                continue;
            }
            let (start, mut totals) = (i, vec![0u64; fields.len()]);
            while i < n && ((i - start) as u64) < segments && !(drop && over(i)) {
                if totals.iter().zip(fields).any(|(t, f)| t + f[i] > most) && i > start {
                    break;
                }
                for (t, f) in totals.iter_mut().zip(fields) {
                    *t += f[i];
                }
                i += 1;
                if totals.iter().any(|t| *t > most) {
                    break;
                }
            }
            packs.push([start as u64, i as u64]);
        }
        packs
    }

    proptest! {
        #[test]
        fn documents_are_packed_by_the_rule(
            lengths in prop::collection::vec((0u64..14, 0u64..14), 0..60), most in 1u64..12, segments in 1u64..6,
            drop: bool, two: bool, split in 0usize..60,
        ) {
            let mut fields: Vec<Vec<u64>> = vec![lengths.iter().map(|l| l.0).collect()];
            if two {
                fields.push(lengths.iter().map(|l| l.1).collect());
            }
            let overlong = if drop { Overlong::Drop } else { Overlong::Left };
            let mut packer = Packer::new(most, segments, overlong, fields.len());
            let split = split.min(lengths.len());
            for part in [0..split, split..lengths.len()] {
                let bounds: Vec<Vec<u64>> = fields.iter().map(|f| {
                    let mut ends = vec![f[..part.start].iter().sum::<u64>()];
                    for l in &f[part.clone()] { ends.push(ends[ends.len() - 1] + l); }
                    ends
                }).collect();
                packer.push(&bounds).unwrap();
            }
            prop_assert_eq!(packer.finish(), naive(&fields, most, segments, drop));
        }
    }
}
