//! Sums of ranges of leaves. Leaves are combined pairwise:
//!
//! ```text
//! leaves   0   1   2   3   4   5   6
//! level 1  0 - 1   2 - 3   4 - 5
//! level 2  0 ----- 3
//! total    ((0 to 3) + (4 to 5)) + 6
//! ```
//!
//! A node of this tree begins at a multiple of its size. The sums of a range of leaves are the largest nodes in it ([`Sums`]), so
//! the result has the same bits for any ranges that tasks sum.

use super::moments::Stats;
use crate::error::{Error, Kind, Result};

/// A node of the tree: the sums of `1 << level` leaves, or of fewer at the end.
#[derive(Clone, Debug)]
pub struct SumNode {
    /// The number of its first leaf, a multiple of `1 << level`.
    pub first: u64,
    /// 0 for a leaf.
    pub level: u32,
    /// Sums over its rows.
    pub sums: Stats,
}

/// The sums of a range of leaves: the largest nodes in it, in order.
#[derive(Clone, Debug, Default)]
pub struct Sums {
    nodes: Vec<SumNode>,
}

impl Sums {
    /// The nodes, in order.
    pub fn nodes(&self) -> &[SumNode] {
        &self.nodes
    }

    /// Adds the node that follows, and combines nodes that are halves of a larger one. Errors if another one follows, or if its
    /// width differs.
    pub fn push(&mut self, next: SumNode) -> Result<()> {
        let size = 1u64.checked_shl(next.level).filter(|size| next.first.is_multiple_of(*size));
        let end = size.and_then(|size| next.first.checked_add(size));
        if end.is_none() {
            let detail =
                format!("sums: expected a node's first leaf to be a multiple of its size, found {}", next.first);
            return Err(Error::new(Kind::Argument, detail));
        }
        if let Some(last) = self.nodes.last() {
            let expected = last.first + (1 << last.level);
            if next.first != expected {
                let what = if next.first > expected { "a hole" } else { "an overlap" };
                let detail = format!("sums: expected leaf {expected} to follow, found {}: {what}", next.first);
                return Err(Error::new(Kind::Argument, detail));
            }
            if next.sums.mean.len() != last.sums.mean.len() {
                let detail =
                    format!("sums: expected sums of {} columns, found {}", last.sums.mean.len(), next.sums.mean.len());
                return Err(Error::new(Kind::Argument, detail));
            }
        }
        self.nodes.push(next);
        while let [.., left, right] = &mut self.nodes[..] {
            if left.level != right.level || !left.first.is_multiple_of(2 << left.level) {
                break;
            }
            left.sums.join(&right.sums);
            left.level += 1;
            self.nodes.pop();
        }
        Ok(())
    }

    /// The sums of all rows, if these are the sums of all leaves; `None` without leaves.
    pub fn total(self) -> Option<Stats> {
        let mut nodes = self.nodes.into_iter().map(|node| node.sums);
        let mut all = nodes.next()?;
        nodes.for_each(|next| all.join(&next));
        Some(all)
    }
}
