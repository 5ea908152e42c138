//! The values of a pickle as Python objects. Only plain types and numpy arrays are constructed.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use actshard_core::files::shards::{self, Values};
use actshard_core::parse::arrays::ArrayPlace;
use actshard_core::parse::pickle::shard::layers;
use actshard_core::parse::pickle::{Id, Node, Tree, machine};
use actshard_core::parse::torch::TorchFile;
use actshard_core::parse::zip::shown;
use actshard_core::source::Io;
use actshard_core::source::local::Local;
use actshard_core::threads::Watch;
use actshard_core::{Error, Kind};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyInt, PyList, PySet, PyString, PyTuple};

use crate::arguments::helper;
use crate::{detach, errors};

/// Maximum nesting of containers; deeper input is an attack on the stack.
const DEPTH: usize = 64;

/// Why values could not be converted to objects.
pub enum Failed {
    /// Python raised an exception.
    Python(PyErr),
    /// The values are unsupported.
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

/// Bytes of arrays that may be copied: this, plus four times the input. Arrays can share bytes in a pickle; the objects made of
/// them do not.
const COPIES: usize = 24 << 20;
/// The size of a torch file's object with shared values repeated: this, plus sixteen times the pickle.
const TRAVERSED: u64 = 64 << 20;
/// Bytes of text and metadata of a shard in a table, which repeats shared values: this, plus four times the input.
const TABLE: u64 = 8 << 20;

/// The place of an array in a file.
#[pyclass(frozen, module = "actshard._native")]
pub struct StoredArray {
    pub place: ArrayPlace,
}

/// An object that is unsupported.
#[pyclass(frozen, module = "actshard._native")]
pub struct RefusedObject {
    /// The name of its class or function.
    #[pyo3(get)]
    name: String,
    /// The offset in the file at which it names a global that no tensor needs; None if it names none.
    #[pyo3(get)]
    global_at: Option<u64>,
}

/// Makes Python objects of the values of a pickle.
pub struct ObjectMaker<'a, 'py> {
    py: Python<'py>,
    tree: &'a Tree,
    input: &'a [u8],
    /// The file of torch that has the tensors.
    torch: Option<&'a TorchFile>,
    /// Finished objects and their sizes: a shared value becomes one shared object, as with Python's unpickler.
    made: HashMap<Id, (Bound<'py, PyAny>, u64)>,
    /// Values being converted, to detect one that contains itself.
    open: HashSet<Id>,
    /// Bytes of arrays that may still be copied.
    copies: usize,
}

impl<'a, 'py> ObjectMaker<'a, 'py> {
    fn new(py: Python<'py>, tree: &'a Tree, input: &'a [u8]) -> ObjectMaker<'a, 'py> {
        let copies = COPIES.saturating_add(input.len().saturating_mul(4));
        ObjectMaker { py, tree, input, torch: None, made: HashMap::new(), open: HashSet::new(), copies }
    }

    /// For the object of a file of torch.
    pub fn of_torch(py: Python<'py>, file: &'a TorchFile) -> ObjectMaker<'a, 'py> {
        ObjectMaker { torch: Some(file), ..ObjectMaker::new(py, &file.tree, &file.pickle) }
    }

    /// The whole object. Refused if it is far larger when traversed than its pickle.
    pub fn whole(&mut self) -> Result<Bound<'py, PyAny>, Failed> {
        let allowed = TRAVERSED.saturating_add((self.input.len() as u64).saturating_mul(16));
        match self.sized(self.tree.root())? {
            (_, size) if size > allowed => Err(Error::new(
                Kind::Format,
                format!("values shared many times: more than {allowed} bytes if each use is counted"),
            )
            .into()),
            (made, _) => Ok(made),
        }
    }

    fn make(&mut self, id: Id) -> Result<Bound<'py, PyAny>, Failed> {
        Ok(self.sized(id)?.0)
    }

    /// A value, and its size with shared values repeated: 26 nested lists that each contain the previous one twice are
    /// 26 objects, but 2^26 values when traversed.
    fn sized(&mut self, id: Id) -> Result<(Bound<'py, PyAny>, u64), Failed> {
        if let Some((made, size)) = self.made.get(&id) {
            return Ok((made.clone(), *size));
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
        let size = self.size(id);
        self.made.insert(id, (made.clone(), size));
        Ok((made, size))
    }

    /// The size of a value whose parts are finished.
    fn size(&self, id: Id) -> u64 {
        let of = |id: &Id| self.made.get(id).map_or(0, |(_, size)| *size);
        let all = |sizes: &mut dyn Iterator<Item = u64>| sizes.fold(64u64, u64::saturating_add);
        match self.tree.node(id) {
            Node::Str(blob) | Node::Bytes(blob) | Node::ByteArray(blob) | Node::Big(blob) => blob.len() + 16,
            Node::List(items) | Node::Tuple(items) | Node::Set(items) => all(&mut items.iter().map(of)),
            Node::Dict(pairs) => all(&mut pairs.iter().map(|(key, value)| of(key).saturating_add(of(value)))),
            // As Python numbers.
            Node::Array(array) => {
                let elements = array.data.len() / array.element.dtype.size().unwrap_or(1).max(1) as u64;
                array.data.len().max(elements.saturating_mul(8)).saturating_add(64)
            }
            _ => 16,
        }
    }

    /// The objects of a sequence.
    fn make_all(&mut self, items: &[Id]) -> Result<Vec<Bound<'py, PyAny>>, Failed> {
        items.iter().map(|id| self.make(*id)).collect()
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
            Node::List(items) => PyList::new(py, self.make_all(items)?)?.into_any(),
            Node::Tuple(items) => PyTuple::new(py, self.make_all(items)?)?.into_any(),
            Node::Dict(pairs) => {
                let dict = PyDict::new(py);
                for (key, value) in pairs {
                    let (key, value) = (self.make(*key)?, self.make(*value)?);
                    dict.set_item(key, value)?;
                }
                dict.into_any()
            }
            Node::Array(array) if self.torch.is_some_and(|file| file.array_place(array).is_some()) => {
                match self.torch.and_then(|file| file.array_place(array)) {
                    Some(place) => Bound::new(py, StoredArray { place })?.into_any(),
                    None => py.None().into_bound(py),
                }
            }
            Node::Array(array) => {
                let bytes = array.data.len() as usize;
                self.copies = self.copies.checked_sub(bytes).ok_or_else(|| {
                    Error::new(
                        Kind::Format,
                        "its arrays share bytes, and need more than four times the file's size as separate arrays",
                    )
                })?;
                let data = PyByteArray::new(py, tree.bytes(input, &array.data));
                let name = array.element.dtype.name();
                helper(py, "pickled_array")?.call1((
                    data,
                    name,
                    array.element.swapped,
                    array.shape.clone(),
                    array.fortran,
                    array.over_buffer,
                ))?
            }
            Node::Scalar(element, blob) => {
                let data = PyBytes::new(py, tree.bytes(input, blob));
                helper(py, "pickled_scalar")?.call1((data, element.dtype.name(), element.swapped))?
            }
            Node::Element(element) => helper(py, "stored")?.call1((element.dtype.name(),))?,
            Node::Set(items) => PySet::new(py, self.make_all(items)?)?.into_any(),
            Node::Tensor(tensor) => match self.torch.and_then(|file| file.place(tensor)) {
                Some(place) => Bound::new(py, StoredArray { place })?.into_any(),
                None => return Err(Error::new(Kind::Internal, "a tensor outside a file of torch").into()),
            },
            Node::Name(blob) => text(py, tree.bytes(input, blob))?,
            Node::Refused(object) => {
                let name = shown(tree.bytes(input, &object.name));
                let at = self.torch.and_then(|file| file.pickle_at).unwrap_or(0);
                let global_at = object.global_at.map(|byte| at + byte);
                Bound::new(py, RefusedObject { name, global_at })?.into_any()
            }
            Node::Unfinished | Node::Storage(_) => {
                let error = Error::new(Kind::UnsafePickle, "contains an object that is not a plain value");
                return Err(tree.global_at(id).map_or(error.clone(), |at| error.byte(at)).into());
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

/// The value of a pickle of plain data and numpy arrays, equal to the result of Python's unpickler.
#[pyfunction]
pub fn load_pickle<'py>(py: Python<'py>, data: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    detach::guarded(py, || {
        let tree = detach::detached(py, |_| machine::parse(data))?;
        let mut maker = ObjectMaker::new(py, &tree, data);
        maker.make(tree.root()).map_err(|failed| match failed {
            Failed::Python(raised) => raised,
            Failed::Core(error) => errors::raise(py, &error),
        })
    })
}

/// The value of a pickle file. A gzipped file may inflate to `limit` bytes, or to what is usual for its size if that is more.
#[pyfunction]
pub fn load_pickle_file<'py>(
    py: Python<'py>,
    path: PathBuf,
    compressed: bool,
    limit: u64,
) -> PyResult<Bound<'py, PyAny>> {
    detach::guarded(py, || {
        let read = |watch: Watch<'_>| {
            let data = shards::read_file(&Local { io: Io::Pread }, &path.as_path().into(), compressed, limit, watch)?;
            let tree = machine::parse(&data).map_err(|e| e.at(&path))?;
            Ok((data, tree))
        };
        let (data, tree) = detach::detached(py, read)?;
        let mut maker = ObjectMaker::new(py, &tree, &data);
        maker.make(tree.root()).map_err(|failed| match failed {
            Failed::Python(raised) => raised,
            Failed::Core(error) => errors::raise(py, &error.at(&path)),
        })
    })
}

/// For every sample of a shard, in order: `(sample_idx, text_preview, shape, layers, metadata)`. Text and metadata come from
/// the first layer that contains the sample.
pub fn records<'py>(py: Python<'py>, values: &Values) -> Result<Vec<Bound<'py, PyAny>>, Failed> {
    let (tree, input) = (&values.tree, values.input());
    let layers = layers(tree, input, None)?;
    let mut of: HashMap<i64, (Id, &[u64], Vec<i64>)> = HashMap::new();
    for (layer, list) in &layers.named {
        for item in &layers.lists[*list] {
            let (_, _, held) = of.entry(item.sample).or_insert_with(|| (item.at, &item.array.shape, vec![]));
            held.push(*layer);
        }
    }
    let mut maker = ObjectMaker::new(py, tree, input);
    let mut made = vec![];
    let allowed = TABLE.saturating_add((input.len() as u64).saturating_mul(4));
    let (mut size, mut names, mut seen) = (0u64, HashSet::new(), HashSet::new());
    for sample in values.index.samples() {
        let Some((at, shape, held)) = of.remove(sample) else { continue };
        let Node::Dict(fields) = tree.node(at) else { continue };
        let mut field = |name: &str| match tree.get(input, fields, name) {
            Some(id) => maker.sized(id),
            None => Ok((py.None().into_bound(py), 0)),
        };
        let ((text, text_size), (metadata, metadata_size)) = (field("text_preview")?, field("metadata")?);
        // A field of the metadata is a column, with an entry for every sample.
        if let Some(id) = tree.get(input, fields, "metadata").filter(|id| seen.insert(*id))
            && let Node::Dict(pairs) = tree.node(id)
        {
            names.extend(pairs.iter().map(|(key, _)| name_of(tree, input, *key)));
        }
        size = size.saturating_add(text_size).saturating_add(metadata_size);
        let columns = (names.len() as u64).saturating_mul(8).saturating_mul(values.index.samples().len() as u64);
        if size.saturating_add(columns) > allowed {
            return Err(Error::new(
                Kind::Format,
                format!(
                    "its text and metadata need more than {allowed} bytes as a table: more values are shared than a file of this size should have"
                ),
            )
            .into());
        }
        made.push((*sample, text, shape, held, metadata).into_pyobject(py)?.into_any());
    }
    Ok(made)
}

/// A key that distinguishes the keys of a dict.
fn name_of<'a>(tree: &'a Tree, input: &'a [u8], key: Id) -> (u64, &'a [u8]) {
    match tree.node(key) {
        Node::Str(blob) => (0, tree.bytes(input, blob)),
        Node::Bytes(blob) | Node::Big(blob) => (1, tree.bytes(input, blob)),
        Node::Int(n) => (n.rotate_left(8) as u64 ^ 2, &[]),
        Node::Float(x) => (x.to_bits() ^ 3, &[]),
        Node::Bool(b) => (4 + u64::from(*b), &[]),
        Node::Tuple(_) => (u64::from(key).rotate_left(8) ^ 7, &[]),
        _ => (6, &[]),
    }
}
