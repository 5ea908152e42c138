//! Pickles of plain data and numpy arrays, read without executing anything.
//!
//! [`machine`] interprets the opcodes that data needs; every other opcode or global is an error with its name and offset, so
//! that nothing is imported or called. Values are stored in one arena and refer to each other by number, so neither parsing
//! nor freeing is recursive. Array bytes are not copied; values hold their position. [`shard`] reads a shard of activations
//! from the values.
//!
//! Sources: CPython's `pickletools.py` (every opcode, with its argument) and `pickle.py`; numpy's `array_reduce_ex`,
//! `_reconstruct`, `_frombuffer` and `scalar`.

pub mod machine;
pub mod shard;

use std::ops::Range;

use crate::dtype::{Cast, DType};
use crate::error::Result;
use crate::number::to_usize;

/// Index of a value in its tree.
pub type Id = u32;

/// Bytes of a value: in the input, or decoded and owned by the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blob {
    own: bool,
    start: u64,
    len: u64,
}

impl Blob {
    fn new(own: bool, range: Range<usize>) -> Blob {
        Blob { own, start: range.start as u64, len: range.len() as u64 }
    }

    /// The range of the input that holds the bytes, unless the tree owns them.
    pub fn in_input(&self) -> Option<Range<usize>> {
        (!self.own).then(|| self.range())
    }

    /// Number of bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn range(&self) -> Range<usize> {
        to_usize(self.start)..to_usize(self.start + self.len)
    }
}

/// An element type and its byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Element {
    /// The type.
    pub dtype: DType,
    /// Whether elements are byte-swapped.
    pub swapped: bool,
}

/// A numpy array. The length of `data` has been checked against `shape`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumpyArray {
    /// The element type.
    pub element: Element,
    /// Elements along each axis.
    pub shape: Vec<u64>,
    /// Whether the first axis varies fastest.
    pub fortran: bool,
    /// Whether it was made over a buffer (`_frombuffer`, protocol 5), and keeps the buffer's byte order; BUILD fills arrays in
    /// the reader's native byte order.
    pub over_buffer: bool,
    /// Its bytes.
    pub data: Blob,
}

impl NumpyArray {
    /// The range of the input with the array's bytes, if they are in C order and native byte order. A Fortran array counts if
    /// both orders give the same bytes.
    pub fn in_place(&self) -> Option<Range<usize>> {
        let one_axis = self.shape.iter().filter(|n| **n > 1).count() <= 1;
        let right = !self.element.swapped && (!self.fortran || one_axis || self.data.is_empty());
        if right { self.data.in_input() } else { None }
    }
}

/// A storage of torch that a persistent id names: elements outside the pickle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedStorage {
    /// The storage's key, a string.
    pub key: Blob,
    /// Its element type; `None` for an UntypedStorage, whose elements are bytes.
    pub dtype: Option<DType>,
    /// Number of elements.
    pub count: u64,
    /// For a part of a storage (files before torch 1.6): the first element and the number of elements.
    pub part: Option<(u64, u64)>,
}

impl SavedStorage {
    /// Bytes per element.
    pub fn item(&self) -> u64 {
        self.dtype.map_or(1, |dtype| dtype.bits() / 8)
    }
}

/// A tensor of torch. Its numbers are not negative, and its shape and strides have the same length; whether the storage holds
/// all elements is checked against its record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedTensor {
    /// Index in [`Tree::storages`].
    pub storage: u32,
    /// The element type.
    pub dtype: DType,
    /// The first element, in elements of `dtype` from the storage's first byte.
    pub first: u64,
    /// Elements along each axis.
    pub shape: Vec<u64>,
    /// Elements from one index to the next along each axis.
    pub strides: Vec<u64>,
}

/// An object that is not built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The name of its class or function, or a description.
    pub name: Blob,
    /// The offset in the pickle at which it names a global that no tensor or array needs: an unpickler would import it.
    pub global_at: Option<u64>,
}

/// A value of a pickle.
#[derive(Clone, Debug, PartialEq)]
pub enum Node {
    /// `None`.
    None,
    /// A bool.
    Bool(bool),
    /// An int of 64 bits.
    Int(i64),
    /// A larger int: little-endian two's complement.
    Big(Blob),
    /// A float.
    Float(f64),
    /// A str: UTF-8, in which Python allows unpaired surrogates.
    Str(Blob),
    /// Bytes.
    Bytes(Blob),
    /// A bytearray.
    ByteArray(Blob),
    /// A list.
    List(Vec<Id>),
    /// A tuple.
    Tuple(Vec<Id>),
    /// A dict in insertion order; for a repeated key the last value counts.
    Dict(Vec<(Id, Id)>),
    /// A numpy dtype.
    Element(Element),
    /// A numpy array.
    Array(Box<NumpyArray>),
    /// A numpy scalar.
    Scalar(Element, Blob),
    /// A set or frozenset.
    Set(Vec<Id>),
    /// A tensor of torch.
    Tensor(Box<SavedTensor>),
    /// A storage of torch: an index in [`Tree::storages`].
    Storage(u32),
    /// A name that stands for itself: a dtype (`torch.float16`).
    Name(Blob),
    /// An object that is unsupported, by its class or function. Values next to it remain readable.
    Refused(Refusal),
    /// An array without contents (pickles of numpy always have them), or one of the allowed names on its own. An error
    /// wherever it is used.
    Unfinished,
}

/// The values of a pickle.
#[derive(Debug)]
pub struct Tree {
    nodes: Vec<Node>,
    own: Vec<u8>,
    root: Id,
    storages: Vec<SavedStorage>,
    /// Offsets of the allowed names, in the order of their values.
    globals: Vec<(Id, u64)>,
}

impl Tree {
    /// All values, in the order in which they were made.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The storages that tensors refer to.
    pub fn storages(&self) -> &[SavedStorage] {
        &self.storages
    }

    /// The top-level value.
    pub fn root(&self) -> Id {
        self.root
    }

    /// The offset of an allowed name that is a value on its own.
    pub fn global_at(&self, id: Id) -> Option<u64> {
        let number = self.globals.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        self.globals.get(number).map(|(_, at)| *at)
    }

    /// A value.
    pub fn node(&self, id: Id) -> &Node {
        self.nodes.get(id as usize).unwrap_or(&Node::Unfinished)
    }

    /// A value's bytes; `input` is the parsed input.
    pub fn bytes<'a>(&'a self, input: &'a [u8], blob: &Blob) -> &'a [u8] {
        (if blob.own { &self.own[..] } else { input }).get(blob.range()).unwrap_or_default()
    }

    /// The value of a key; the last one if the key is repeated.
    pub fn get(&self, input: &[u8], dict: &[(Id, Id)], key: &str) -> Option<Id> {
        let is = |id: Id| matches!(self.node(id), Node::Str(blob) if self.bytes(input, blob) == key.as_bytes());
        dict.iter().rev().find(|(k, _)| is(*k)).map(|(_, v)| *v)
    }

    /// An integer, Python's or numpy's.
    pub fn integer(&self, input: &[u8], id: Id) -> Option<i64> {
        match self.node(id) {
            Node::Int(n) => Some(*n),
            Node::Scalar(element, blob) => scalar_integer(*element, self.bytes(input, blob)),
            _ => None,
        }
    }

    /// Appends an array's elements to `out` in C order and native byte order.
    pub fn materialise(&self, input: &[u8], array: &NumpyArray, out: &mut Vec<u8>) -> Result<()> {
        let bytes = self.bytes(input, &array.data);
        let first = out.len();
        let dtype = array.element.dtype;
        out.resize(first + bytes.len(), 0);
        let cast = Cast::between(dtype, dtype)?.swapped_if(array.element.swapped);
        let made = &mut out[first..];
        match array.shape[..] {
            [rows, columns] if array.fortran && rows > 1 && columns > 1 => {
                let (rows, columns, size) = (to_usize(rows), to_usize(columns), cast.from_size);
                // Row by row: writes are dense, and a column's cache line serves the following rows.
                for r in 0..rows {
                    for c in 0..columns {
                        let from = (c * rows + r) * size;
                        let to = (r * columns + c) * size;
                        cast.apply(&bytes[from..from + size], &mut made[to..to + size]);
                    }
                }
            }
            _ => cast.apply(bytes, made),
        }
        Ok(())
    }
}

/// A numpy integer's value.
fn scalar_integer(element: Element, bytes: &[u8]) -> Option<i64> {
    let signed = matches!(element.dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64);
    if !signed && !matches!(element.dtype, DType::U8 | DType::U16 | DType::U32 | DType::U64) {
        return None;
    }
    let mut little = bytes.to_vec();
    if element.swapped {
        little.reverse();
    }
    let fill = if signed && little.last().is_some_and(|b| b & 0x80 != 0) { 0xff } else { 0 };
    let mut wide = [fill; 16];
    wide.get_mut(..little.len())?.copy_from_slice(&little);
    i64::try_from(i128::from_le_bytes(wide)).ok()
}
