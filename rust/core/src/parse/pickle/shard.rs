//! What a shard of activations may hold: `{"layer_15": [{"sample_idx", "activation", "shape", "text_preview", "metadata"}]}`.
//!
//! Source: the published text "Activation Shard Format Specification", Shard Files.

use super::{Array, Id, Node, Tree};
use crate::dtype::DType;
use crate::error::{Error, Kind, Result};

/// One sample's activations in one layer.
#[derive(Clone, Debug)]
pub struct Item {
    /// `sample_idx`.
    pub sample: i64,
    /// `activation`: two axes, of a floating type.
    pub array: Array,
    /// The whole item, for its texts and metadata.
    pub at: Id,
}

/// A layer's samples, in the file's order.
#[derive(Clone, Debug)]
pub struct Layer {
    /// The layer's name.
    pub layer: i64,
    /// Its samples.
    pub items: Vec<Item>,
}

/// The layers of a shard, in the file's order.
pub fn layers(tree: &Tree, input: &[u8]) -> Result<Vec<Layer>> {
    let refuse = |what: String| Error::new(Kind::Format, what);
    let Node::Dict(top) = tree.node(tree.root()) else {
        return Err(refuse(format!("expected a dict of layers, found {}", kind_of(tree.node(tree.root())))));
    };
    let mut found: Vec<Layer> = vec![];
    for (key, value) in top {
        let key = match tree.node(*key) {
            Node::Str(blob) => String::from_utf8_lossy(tree.bytes(input, blob)).into_owned(),
            other => return Err(refuse(format!("expected keys such as 'layer_15', found {}", kind_of(other)))),
        };
        let layer = layer_of(&key).ok_or_else(|| {
            refuse(format!("expected keys such as 'layer_15', found '{}'", key.chars().take(40).collect::<String>()))
        })?;
        let Node::List(list) = tree.node(*value) else {
            return Err(refuse(format!("'{key}': expected a list of samples, found {}", kind_of(tree.node(*value)))));
        };
        let mut items = Vec::with_capacity(list.len());
        let mut seen = std::collections::HashSet::with_capacity(list.len());
        for (i, id) in list.iter().enumerate() {
            let item = item(tree, input, *id).map_err(|mut e| {
                e.detail = format!("'{key}'[{i}]: {}", e.detail);
                e
            })?;
            if !seen.insert(item.sample) {
                return Err(refuse(format!("'{key}'[{i}]: sample_idx {} is there twice", item.sample)));
            }
            items.push(item);
        }
        // A key that stands twice: the last counts, as in Python.
        found.retain(|l| l.layer != layer);
        found.push(Layer { layer, items });
    }
    Ok(found)
}

fn layer_of(key: &str) -> Option<i64> {
    // Negative ones are names too: saev counts some layers from the end, and conversion keeps names.
    let number = key.strip_prefix("layer_")?;
    let digits = number.strip_prefix('-').unwrap_or(number);
    let plain = (1..=9).contains(&digits.len())
        && digits.bytes().all(|b| b.is_ascii_digit())
        && (number == "0" || !digits.starts_with('0'));
    if plain { number.parse().ok() } else { None }
}

fn item(tree: &Tree, input: &[u8], id: Id) -> Result<Item> {
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
        let said: Option<Vec<i64>> = match tree.node(id) {
            Node::Tuple(dims) | Node::List(dims) if dims.len() <= 8 => {
                dims.iter().map(|id| tree.integer(input, *id)).collect()
            }
            _ => None,
        };
        let same = said.as_ref().is_some_and(|s| s.iter().map(|n| *n as u64).eq(array.shape.iter().copied()));
        if !same {
            let said = said.map_or("something else".to_string(), |s| format!("{s:?}"));
            return Err(refuse(format!("'shape': says {said}, the array has {:?}", array.shape)));
        }
    }
    Ok(Item { sample, array: (**array).clone(), at: id })
}

/// What a value is, in words.
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
        Node::Unfinished => "an object that was never finished",
    }
}
