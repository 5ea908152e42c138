//! The content of a shard of activations: `{"layer_15": [{"sample_idx", "activation", "shape", "text_preview", "metadata"}]}`.
//!
//! A pickle can refer to one value many times, so its expanded form can be far larger than the file. Each list and each sample
//! is parsed once, however often it occurs, and the memory of the result is limited by the size of the file.
//!
//! Source: the published text "Activation Shard Format Specification", Shard Files.

use std::collections::{HashMap, HashSet};

use super::{Id, Node, NumpyArray, Tree};
use crate::dtype::DType;
use crate::error::{Error, Finding, Kind, Result};
use crate::number::to_usize;

/// Memory for an index: this, plus four times the input.
const MEMORY: usize = 8 << 20;
/// Bytes counted per sample, per position in a list, and per position in a layer: the size of the index and a table of it.
const PER_SAMPLE: usize = 160;
const PER_PLACE: usize = 64;
const PER_LAYER: usize = 32;
/// Longer keys cannot be layer names.
const LONGEST_KEY: u64 = 32;

/// One sample's activations in one layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerSample<'t> {
    /// `sample_idx`.
    pub sample: i64,
    /// `activation`: a 2-D array of a floating type.
    pub array: &'t NumpyArray,
    /// The whole item, for its text and metadata.
    pub at: Id,
}

/// The layers of a shard, in dict order.
#[derive(Clone, Debug)]
pub struct Layers<'t> {
    /// Lists of samples, in file order. Layers may share a list.
    pub lists: Vec<Vec<LayerSample<'t>>>,
    /// Each layer's name, and the index of its list.
    pub named: Vec<(i64, usize)>,
}

/// Counts memory against a limit.
struct Account {
    spent: usize,
    allowed: usize,
}

impl Account {
    fn spend(&mut self, bytes: usize) -> Result<()> {
        self.spent = self.spent.saturating_add(bytes);
        if self.spent <= self.allowed {
            return Ok(());
        }
        Err(Error::new(
            Kind::Format,
            format!(
                "an index of its samples needs more than {} bytes: the layers share more lists than a file of this size should have",
                self.allowed
            ),
        ))
    }
}

/// The layers of a shard. If `listed` is given, any other layer is an error before its samples are parsed.
pub fn layers<'t>(tree: &'t Tree, input: &[u8], listed: Option<&[i64]>) -> Result<Layers<'t>> {
    let refuse = |what: String| Error::new(Kind::Format, what);
    let mut account = Account { spent: 0, allowed: MEMORY.saturating_add(input.len().saturating_mul(4)) };
    let Node::Dict(top) = tree.node(tree.root()) else {
        return Err(refuse(format!("expected a dict of layers, found {}", kind_of(tree.node(tree.root())))));
    };
    // A repeated key has the position of the first and the value of the last, as in Python.
    let allowed: Option<HashSet<i64>> = listed.map(|listed| listed.iter().copied().collect());
    let mut order: Vec<(i64, Id)> = vec![];
    let mut places: HashMap<i64, usize> = HashMap::new();
    for (key, value) in top {
        let layer = layer_of_key(tree, input, *key)?;
        if let Some(place) = places.get(&layer) {
            order[*place].1 = *value;
            continue;
        }
        if allowed.as_ref().is_some_and(|allowed| !allowed.contains(&layer)) {
            let listed = listed.unwrap_or_default();
            return Err(refuse(format!("has layer {layer}, metadata.json lists {} for this shard", shown(listed))));
        }
        account.spend(PER_PLACE)?;
        places.insert(layer, order.len());
        order.push((layer, *value));
    }
    let mut found = Layers { lists: vec![], named: Vec::with_capacity(order.len()) };
    let mut lists: HashMap<Id, usize> = HashMap::new();
    let mut items: HashMap<Id, LayerSample<'t>> = HashMap::new();
    for (layer, value) in order {
        let Node::List(list) = tree.node(value) else {
            let kind = kind_of(tree.node(value));
            return Err(refuse(format!("'layer_{layer}': expected a list of samples, found {kind}")));
        };
        account.spend(list.len().saturating_mul(PER_LAYER))?;
        if let Some(known) = lists.get(&value) {
            found.named.push((layer, *known));
            continue;
        }
        let mut these = Vec::new();
        let mut seen = HashSet::new();
        for (i, id) in list.iter().enumerate() {
            account.spend(PER_PLACE)?;
            let item = match items.get(id) {
                Some(item) => *item,
                None => {
                    account.spend(PER_SAMPLE)?;
                    let item = item(tree, input, *id).map_err(|mut e| {
                        e.detail = format!("'layer_{layer}'[{i}]: {}", e.detail);
                        e
                    })?;
                    items.insert(*id, item);
                    item
                }
            };
            if !seen.insert(item.sample) {
                let detail = format!("'layer_{layer}'[{i}]: sample_idx {} occurs twice", item.sample);
                return Err(refuse(detail).finds(Finding::DuplicateSample));
            }
            these.push(item);
        }
        lists.insert(value, found.lists.len());
        found.named.push((layer, found.lists.len()));
        found.lists.push(these);
    }
    Ok(found)
}

/// Layer names for a message, at most a dozen.
fn shown(listed: &[i64]) -> String {
    if listed.len() <= 12 {
        format!("{listed:?}")
    } else {
        format!("{:?} and {} more", &listed[..12], listed.len() - 12)
    }
}

fn layer_of_key(tree: &Tree, input: &[u8], key: Id) -> Result<i64> {
    let refuse = |found: String| Error::new(Kind::Format, format!("expected keys such as 'layer_15', found {found}"));
    let Node::Str(blob) = tree.node(key) else { return Err(refuse(kind_of(tree.node(key)).to_string())) };
    let bytes = tree.bytes(input, blob);
    // One text can be the key of many items, so long ones are not read whole.
    let text = || String::from_utf8_lossy(&bytes[..bytes.len().min(160)]).chars().take(40).collect::<String>();
    let name = std::str::from_utf8(bytes.get(..bytes.len().min(to_usize(LONGEST_KEY) + 1)).unwrap_or_default()).ok();
    name.filter(|_| blob.len() <= LONGEST_KEY).and_then(layer_of).ok_or_else(|| refuse(format!("'{}'", text())))
}

fn layer_of(key: &str) -> Option<i64> {
    // Negative names are valid: saev counts some layers from the end, and conversion keeps names.
    let number = key.strip_prefix("layer_")?;
    let digits = number.strip_prefix('-').unwrap_or(number);
    let plain = (1..=9).contains(&digits.len())
        && digits.bytes().all(|b| b.is_ascii_digit())
        && (number == "0" || !digits.starts_with('0'));
    if plain { number.parse().ok() } else { None }
}

fn item<'t>(tree: &'t Tree, input: &[u8], id: Id) -> Result<LayerSample<'t>> {
    let refuse = |what: String| Error::new(Kind::Format, what);
    let Node::Dict(fields) = tree.node(id) else {
        return Err(refuse(format!("expected a dict, found {}", kind_of(tree.node(id)))));
    };
    let get = |name: &str| tree.get(input, fields, name);
    let sample = get("sample_idx")
        .and_then(|id| tree.integer(input, id))
        .filter(|n| *n >= 0)
        .ok_or_else(|| refuse("'sample_idx': expected an integer from 0 up".to_string()))?;
    let array = match get("activation").map(|id| tree.node(id)) {
        Some(Node::Array(array)) => array,
        other => {
            let found = other.map_or("nothing", kind_of);
            return Err(refuse(format!("'activation': expected a numpy array, found {found}")));
        }
    };
    if array.shape.len() != 2 {
        return Err(refuse(format!("'activation': expected (tokens, hidden), found the shape {:?}", array.shape)));
    }
    let dtype = array.element.dtype;
    if !matches!(dtype, DType::F16 | DType::F32 | DType::F64) {
        return Err(Error::new(
            Kind::Unsupported,
            format!(
                "'activation': expected float16, float32 or float64, found {}",
                dtype.numpy_name().unwrap_or(dtype.name())
            ),
        ));
    }
    if let Some(id) = get("shape").filter(|id| !matches!(tree.node(*id), Node::None)) {
        let declared: Option<Vec<i64>> = match tree.node(id) {
            Node::Tuple(dims) | Node::List(dims) if dims.len() <= 8 => {
                dims.iter().map(|id| tree.integer(input, *id)).collect()
            }
            _ => None,
        };
        let same = declared
            .as_ref()
            .is_some_and(|s| s.iter().map(|n| u64::try_from(*n).ok()).eq(array.shape.iter().map(|n| Some(*n))));
        if !same {
            let found = declared.map_or("something else".to_string(), |s| format!("{s:?}"));
            return Err(refuse(format!("'shape': expected the array's shape {:?}, found {found}", array.shape)));
        }
    }
    Ok(LayerSample { sample, array, at: id })
}

/// A value's type for messages.
pub fn kind_of(node: &Node) -> &'static str {
    match node {
        Node::None => "None",
        Node::Bool(_) => "a bool",
        Node::Int(_) | Node::Big(_) => "an int",
        Node::Float(_) => "a float",
        Node::Str(_) => "a str",
        Node::Bytes(_) | Node::ByteArray(_) => "bytes",
        Node::List(_) => "a list",
        Node::Tuple(_) => "a tuple",
        Node::Dict(_) => "a dict",
        Node::Element(_) => "a dtype",
        Node::Array(_) => "an array",
        Node::Scalar(..) => "a numpy scalar",
        Node::Set(_) => "a set",
        Node::Tensor(_) => "a tensor",
        Node::Storage(_) => "a storage",
        Node::Name(_) => "a name",
        Node::Refused(_) => "an unsupported object of torch",
        Node::Unfinished => "an unfinished object",
    }
}
