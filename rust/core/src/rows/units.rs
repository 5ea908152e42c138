//! Units: examples that are decoded together.

/// Examples that should be read together because they are decoded together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Units {
    /// Each example separately.
    Examples,
    /// Examples between neighbouring bounds; the first is 0, the last the number of examples.
    Between(Vec<u64>),
}
