//! The values of a pickle as Python objects. Nothing is imported or called but what makes plain objects and numpy arrays.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use actshard_core::bytes::decoded::Block;
use actshard_core::bytes::inflate;
use actshard_core::bytes::shards::Values;
use actshard_core::parse::pickle::shard::layers;
use actshard_core::parse::pickle::{Id, Node, Tree, machine};
use actshard_core::{Error, Kind};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyInt, PyList, PyString, PyTuple};

use crate::rows::helper;
use crate::{detach, errors};

/// Containers in containers: metadata that nest deeper are somebody's attempt at our stack.
const DEPTH: usize = 64;

/// Why values could not be made into objects.
pub enum Failed {
    /// Python said no.
    Python(PyErr),
    /// The values are none we make.
    Core(Error),
}

impl From<PyErr> for Failed {
    fn from(raised: PyErr) -> Failed {
        Failed::Python(raised)
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Failed {
        Failed::Core(error)
    }
}

struct Maker<'a, 'py> {
    py: Python<'py>,
    tree: &'a Tree,
    input: &'a [u8],
    /// Objects made already: a value that stands in many places is one object there, as in a stock reader.
    made: HashMap<Id, Bound<'py, PyAny>>,
    /// Values being made: one inside itself is refused.
    open: HashSet<Id>,
}

impl<'py> Maker<'_, 'py> {
    fn make(&mut self, id: Id) -> Result<Bound<'py, PyAny>, Failed> {
        if let Some(made) = self.made.get(&id) {
            return Ok(made.clone());
        }
        if self.open.len() >= DEPTH {
            return Err(Error::new(Kind::Unsupported, format!("values nested more than {DEPTH} deep")).into());
        }
        if !self.open.insert(id) {
            return Err(Error::new(Kind::Format, "a value that contains itself").into());
        }
        let made = self.make_new(id);
        self.open.remove(&id);
        let made = made?;
        self.made.insert(id, made.clone());
        Ok(made)
    }

    fn make_new(&mut self, id: Id) -> Result<Bound<'py, PyAny>, Failed> {
        let (py, tree, input) = (self.py, self.tree, self.input);
        Ok(match tree.node(id) {
            Node::None => py.None().into_bound(py),
            Node::Bool(b) => b.into_pyobject(py).map_err(PyErr::from)?.to_owned().into_any(),
            Node::Int(n) => n.into_pyobject(py).map_err(PyErr::from)?.into_any(),
            Node::Big(blob) => {
                let bytes = PyBytes::new(py, tree.bytes(input, blob));
                let keywords = PyDict::new(py);
                keywords.set_item("signed", true)?;
                py.get_type::<PyInt>().call_method("from_bytes", (bytes, "little"), Some(&keywords))?
            }
            Node::Float(x) => x.into_pyobject(py).map_err(PyErr::from)?.into_any(),
            Node::Str(blob) => text(py, tree.bytes(input, blob))?,
            Node::Bytes(blob) => PyBytes::new(py, tree.bytes(input, blob)).into_any(),
            Node::ByteArray(blob) => PyByteArray::new(py, tree.bytes(input, blob)).into_any(),
            Node::List(items) => {
                let items = items.iter().map(|id| self.make(*id)).collect::<Result<Vec<_>, _>>()?;
                PyList::new(py, items)?.into_any()
            }
            Node::Tuple(items) => {
                let items = items.iter().map(|id| self.make(*id)).collect::<Result<Vec<_>, _>>()?;
                PyTuple::new(py, items)?.into_any()
            }
            Node::Dict(pairs) => {
                let dict = PyDict::new(py);
                for (key, value) in pairs {
                    let (key, value) = (self.make(*key)?, self.make(*value)?);
                    dict.set_item(key, value)?;
                }
                dict.into_any()
            }
            Node::Array(array) => {
                let data = PyByteArray::new(py, tree.bytes(input, &array.data));
                let name = array.element.dtype.name();
                helper(py, "pickled_array")?.call1((
                    data,
                    name,
                    array.element.swapped,
                    array.shape.clone(),
                    array.fortran,
                ))?
            }
            Node::Scalar(element, blob) => {
                let data = PyBytes::new(py, tree.bytes(input, blob));
                helper(py, "pickled_scalar")?.call1((data, element.dtype.name(), element.swapped))?
            }
            Node::Element(element) => helper(py, "stored")?.call1((element.dtype.name(),))?,
            Node::Unfinished => {
                return Err(Error::new(Kind::UnsafePickle, "holds an object that is no plain value").into());
            }
        })
    }
}

fn text<'py>(py: Python<'py>, utf8: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    match std::str::from_utf8(utf8) {
        Ok(text) => Ok(PyString::new(py, text).into_any()),
        Err(_) => PyBytes::new(py, utf8).call_method1("decode", ("utf-8", "surrogatepass")),
    }
}

/// Everything in a pickle of plain data and numpy arrays, as a stock reader would give it.
#[pyfunction]
pub fn load_pickle<'py>(py: Python<'py>, data: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    detach::guarded(py, || {
        let tree = detach::detached(py, |_| machine::parse(data))?;
        let mut maker = Maker { py, tree: &tree, input: data, made: HashMap::new(), open: HashSet::new() };
        maker.make(tree.root()).map_err(|failed| match failed {
            Failed::Python(raised) => raised,
            Failed::Core(error) => errors::raise(py, &error),
        })
    })
}

/// The same of a file, inflated to `limit` bytes at most if it is gzip'ed.
#[pyfunction]
pub fn load_pickle_file<'py>(
    py: Python<'py>,
    path: PathBuf,
    compressed: bool,
    limit: u64,
) -> PyResult<Bound<'py, PyAny>> {
    detach::guarded(py, || {
        let read = |_: actshard_core::par::pool::Watch<'_>| {
            let stored = std::fs::read(&path).map_err(|e| Error::from_io(&e, &path, "read"))?;
            let data = if compressed {
                inflate::inflate_beside(&stored, limit, &|| Ok(())).map_err(|e| e.at(&path))?
            } else {
                Block::from(stored)
            };
            let tree = machine::parse(&data).map_err(|e| e.at(&path))?;
            Ok((data, tree))
        };
        let (data, tree) = detach::detached(py, read)?;
        let mut maker = Maker { py, tree: &tree, input: &data, made: HashMap::new(), open: HashSet::new() };
        maker.make(tree.root()).map_err(|failed| match failed {
            Failed::Python(raised) => raised,
            Failed::Core(error) => errors::raise(py, &error.at(&path)),
        })
    })
}

/// For every sample of a shard, in the order of its examples: `(sample_idx, text_preview, shape, layers, metadata)`, texts
/// and metadata as the first layer that holds the sample gives them.
pub fn records<'py>(py: Python<'py>, values: &Values) -> Result<Vec<Bound<'py, PyAny>>, Failed> {
    let (tree, input) = (&values.tree, values.input());
    let layers = layers(tree, input)?;
    let mut of: HashMap<i64, (Id, Vec<u64>, Vec<i64>)> = HashMap::new();
    for layer in &layers {
        for item in &layer.items {
            let (_, _, held) = of.entry(item.sample).or_insert_with(|| (item.at, item.array.shape.clone(), vec![]));
            held.push(layer.layer);
        }
    }
    let mut maker = Maker { py, tree, input, made: HashMap::new(), open: HashSet::new() };
    let mut made = vec![];
    for sample in values.index.samples() {
        let Some((at, shape, held)) = of.remove(sample) else { continue };
        let Node::Dict(fields) = tree.node(at) else { continue };
        let mut field = |name: &str| match tree.get(input, fields, name) {
            Some(id) => maker.make(id),
            None => Ok(py.None().into_bound(py)),
        };
        let (text, metadata) = (field("text_preview")?, field("metadata")?);
        made.push((*sample, text, shape, held, metadata).into_pyobject(py)?.into_any());
    }
    Ok(made)
}
