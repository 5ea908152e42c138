//! The index of a shard: its samples, and the position of each array's rows.

use std::collections::HashMap;
use std::sync::Arc;

use super::spec::ShardSpec;
use crate::dtype::DType;
use crate::error::{Error, Finding, Kind, Result};
use crate::memory::buffer::Buffer;
use crate::parse::pickle::Tree;
use crate::parse::pickle::shard::{LayerSample, layers};

/// Supported types of arrays. Rows of one type are read together, with one cast per type.
pub const TYPES: [DType; 3] = [DType::F16, DType::F32, DType::F64];

/// The index of a type in [`TYPES`].
pub(super) fn class_of(dtype: DType) -> Option<usize> {
    TYPES.iter().position(|t| *t == dtype)
}

/// The position of one sample's rows in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spot {
    pub offset: u64,
    pub tokens: u32,
    /// Index of the type in [`TYPES`].
    pub class: u8,
    /// Whether they are in the byte-swapped and reordered copies.
    pub aside: bool,
}

/// The samples of a layer.
#[derive(Debug, PartialEq, Eq)]
struct List {
    spots: Vec<Spot>,
    /// The sample of each spot, ascending; `None` if spot `i` is sample `i`.
    samples: Option<Vec<u32>>,
}

impl List {
    fn get(&self, sample: usize) -> Option<Spot> {
        let at = match &self.samples {
            None => sample,
            Some(samples) => samples.binary_search(&u32::try_from(sample).ok()?).ok()?,
        };
        self.spots.get(at).copied()
    }
}

/// The content of a shard.
#[derive(Debug, PartialEq, Eq)]
pub struct ShardIndex {
    pub(super) width: u64,
    /// The type of the first array, as an index in [`TYPES`], and a bit for each type that occurs.
    first: u8,
    types: u8,
    /// Samples in order of first occurrence.
    pub(super) samples: Vec<i64>,
    /// Groups may share a list.
    lists: Vec<List>,
    /// The list of each group in the shard.
    of_group: HashMap<usize, usize>,
    /// Bytes that must be in memory to read rows.
    pub(super) decoded: u64,
    pub(super) aside: u64,
    /// Bytes of the file when it was indexed, or of its inflated content.
    pub(super) len: u64,
}

impl ShardIndex {
    /// `sample_idx` of each sample.
    pub fn samples(&self) -> &[i64] {
        &self.samples
    }

    /// Elements per row, and the type of the first array; `None` for a shard without arrays.
    pub fn row(&self) -> Option<(u64, DType)> {
        (self.types > 0).then(|| (self.width, TYPES[usize::from(self.first)]))
    }

    /// A bit for each type that occurs.
    pub(super) fn types(&self) -> u8 {
        self.types
    }

    /// The position of a sample's rows in a group, if the sample has the group.
    pub(super) fn spot(&self, group: usize, sample: usize) -> Option<Spot> {
        self.lists[*self.of_group.get(&group)?].get(sample)
    }

    /// Compares a shard's content with the metadata, and finds every array. `groups` maps layer names to groups. Also returns
    /// copies of arrays that are not in C order and native byte order.
    pub(super) fn build(
        spec: &ShardSpec,
        groups: &HashMap<i64, usize>,
        tree: &Tree,
        input: &[u8],
        in_memory: bool,
    ) -> Result<(ShardIndex, Option<Arc<Buffer>>)> {
        let refuse = |what: String| Err(Error::new(Kind::Format, what));
        let found = layers(tree, input, Some(&spec.layers))?;
        let mut made = Building {
            spec,
            tree,
            input,
            local: HashMap::new(),
            aside: vec![],
            here: false,
            moved: HashMap::new(),
            index: ShardIndex {
                width: 0,
                first: 0,
                types: 0,
                samples: vec![],
                lists: Vec::with_capacity(found.lists.len()),
                of_group: HashMap::new(),
                decoded: 0,
                aside: 0,
                len: input.len() as u64,
            },
        };
        for items in &found.lists {
            let list = made.list(items)?;
            made.index.lists.push(list);
        }
        let Building { mut index, aside, here, .. } = made;
        for (layer, list) in &found.named {
            let Some(group) = groups.get(layer) else {
                return Err(Error::new(Kind::Internal, format!("layer {layer} is not a layer of the dataset")));
            };
            index.of_group.insert(*group, *list);
        }
        if index.samples.len() as u64 != spec.samples {
            let detail = format!("has {} samples, metadata.json has {}", index.samples.len(), spec.samples);
            return refuse(detail).map_err(|e| e.finds(Finding::CountClaim));
        }
        index.decoded = if in_memory && here { index.len } else { 0 };
        index.aside = aside.len() as u64;
        Ok((index, (!aside.is_empty()).then(|| Arc::new(Buffer::from(aside)))))
    }
}

struct Building<'a> {
    spec: &'a ShardSpec,
    tree: &'a Tree,
    input: &'a [u8],
    /// Indices of samples by `sample_idx`.
    local: HashMap<i64, usize>,
    aside: Vec<u8>,
    /// Whether some array's rows are used directly from the input.
    here: bool,
    /// Finished copies, by everything that determines a copy's content: an array that several items share is copied once.
    moved: HashMap<(u64, DType, bool, bool, Vec<u64>), u64>,
    index: ShardIndex,
}

impl Building<'_> {
    fn list(&mut self, items: &[LayerSample<'_>]) -> Result<List> {
        let refuse = |what: String| Err(Error::new(Kind::Format, what));
        let mut placed: Vec<(u32, Spot)> = Vec::with_capacity(items.len());
        for item in items {
            let next = self.index.samples.len();
            let at = *self.local.entry(item.sample).or_insert(next);
            if at == next {
                let (first, last) = self.spec.ids;
                if !(first..=last).contains(&item.sample) {
                    return refuse(format!(
                        "has sample_idx {}, metadata.json gives the range {first} to {last}",
                        item.sample
                    ));
                }
                self.index.samples.push(item.sample);
            }
            let at = u32::try_from(at).map_err(|_| {
                Error::new(Kind::Unsupported, "expected fewer than 2^32 samples in one shard, found more")
            })?;
            placed.push((at, self.spot(item)?));
        }
        placed.sort_unstable_by_key(|(at, _)| *at);
        let in_order = placed.iter().enumerate().all(|(i, (at, _))| i == *at as usize);
        Ok(List {
            samples: (!in_order).then(|| placed.iter().map(|(at, _)| *at).collect()),
            spots: placed.into_iter().map(|(_, spot)| spot).collect(),
        })
    }

    fn spot(&mut self, item: &LayerSample<'_>) -> Result<Spot> {
        let array = item.array;
        let [tokens, width] = array.shape[..] else {
            return Err(Error::new(Kind::Internal, "expected an array of two axes"));
        };
        let dtype = array.element.dtype;
        let Some(class) = class_of(dtype).and_then(|class| u8::try_from(class).ok()) else {
            return Err(Error::new(Kind::Internal, format!("an array of {}", dtype.name())));
        };
        if self.index.types == 0 {
            (self.index.width, self.index.first) = (width, class);
        } else if width != self.index.width {
            return Err(Error::new(
                Kind::Format,
                format!(
                    "sample_idx {}: expected an array of width {1}, as in earlier samples, found {width}",
                    item.sample, self.index.width
                ),
            ));
        }
        self.index.types |= 1 << class;
        let tokens = u32::try_from(tokens).map_err(|_| {
            Error::new(Kind::Unsupported, format!("expected fewer than 2^32 tokens in one sample, found {tokens}"))
        })?;
        if let Some(range) = array.in_place() {
            self.here |= tokens > 0;
            return Ok(Spot { offset: range.start as u64, tokens, class, aside: false });
        }
        let bytes = self.tree.bytes(self.input, &array.data);
        let key = (bytes.as_ptr() as u64, dtype, array.element.swapped, array.fortran, array.shape.clone());
        if let Some(offset) = self.moved.get(&key) {
            return Ok(Spot { offset: *offset, tokens, class, aside: true });
        }
        // Arrays of different order and type can share bytes; each needs its own copy.
        if self.aside.len() + bytes.len() > self.input.len().saturating_mul(2) {
            return Err(Error::new(
                Kind::Format,
                format!("copies of its arrays need more than twice the {} bytes of the input", self.input.len()),
            ));
        }
        let offset = self.aside.len() as u64;
        self.tree.materialise(self.input, array, &mut self.aside)?;
        self.moved.insert(key, offset);
        Ok(Spot { offset, tokens, class, aside: true })
    }
}
