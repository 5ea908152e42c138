//! The machine: the opcodes of protocols 0 to 5 that data and numpy arrays use, and no others.
//!
//! A stock unpickler imports and calls whatever a file names; lists of allowed module *prefixes* are no help (through
//! numpy's own modules everything can be reached, and from protocol 4 on a name may be a dotted path). Here a global is
//! one of eight (module, name) pairs, compared whole, and each is nothing but a mark for what the next opcodes must look
//! like. Memory is counted as it is taken and is at most a fixed amount and four times the input.

use std::collections::HashMap;
use std::ops::Range;

use super::{Array, Blob, Element, Id, Node, Tree};
use crate::dtype::DType;
use crate::error::{Error, Kind, Result};

/// Memory that values may take beside the input: this, and four times the input.
const MEMORY: usize = 24 << 20;
/// Digits and bytes of an integer: no count or label comes near.
const MAX_INT_BYTES: usize = 1024;

/// The names that data may use. Calling the wrong one, or one in the wrong way, is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Global {
    /// `numpy.core.multiarray._reconstruct`: an array to be given its contents by BUILD.
    Reconstruct,
    /// `numpy.core.numeric._frombuffer`: an array over bytes.
    FromBuffer,
    /// `numpy.dtype`.
    Dtype,
    /// `numpy.ndarray`, which only `_reconstruct` may be given.
    NdArray,
    /// `_codecs.encode`: how protocols 0 to 2 write bytes, as text to be encoded in latin-1.
    Encode,
    /// `numpy.core.multiarray.scalar`.
    Scalar,
    /// `bytes`, which protocols 0 to 2 call for no bytes at all.
    EmptyBytes,
}

fn global(module: &[u8], name: &[u8]) -> Option<Global> {
    Some(match (module, name) {
        (b"numpy.core.multiarray" | b"numpy._core.multiarray", b"_reconstruct") => Global::Reconstruct,
        (b"numpy.core.numeric" | b"numpy._core.numeric", b"_frombuffer") => Global::FromBuffer,
        (b"numpy.core.multiarray" | b"numpy._core.multiarray", b"scalar") => Global::Scalar,
        (b"numpy", b"dtype") => Global::Dtype,
        (b"numpy", b"ndarray") => Global::NdArray,
        (b"_codecs", b"encode") => Global::Encode,
        (b"builtins" | b"__builtin__", b"bytes") => Global::EmptyBytes,
        _ => return None,
    })
}

/// What is on the stack: a value, or something that is on its way to become one.
#[derive(Clone, Debug)]
enum Cell {
    Value(Node),
    Global(Global),
    /// An array that `_reconstruct` made and BUILD has not filled.
    Shell,
}

/// Parses the first pickle in `input`; what follows its STOP is ignored, as Python does.
pub fn parse(input: &[u8]) -> Result<Tree> {
    let allowed = MEMORY.saturating_add(input.len().saturating_mul(4));
    let mut machine = Machine {
        input,
        pos: 0,
        op_at: 0,
        cells: vec![Cell::Value(Node::None), Cell::Value(Node::Bool(false)), Cell::Value(Node::Bool(true))],
        own: vec![],
        stack: vec![],
        marks: vec![],
        memo: HashMap::new(),
        spent: 0,
        allowed,
    };
    let root = machine.run()?;
    let nodes = machine
        .cells
        .into_iter()
        .map(|cell| match cell {
            Cell::Value(node) => node,
            Cell::Global(_) | Cell::Shell => Node::Unfinished,
        })
        .collect();
    Ok(Tree { nodes, own: machine.own, root })
}

struct Machine<'a> {
    input: &'a [u8],
    pos: usize,
    /// Offset of the opcode at work, for errors.
    op_at: usize,
    cells: Vec<Cell>,
    own: Vec<u8>,
    stack: Vec<Id>,
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
    spent: usize,
    allowed: usize,
}

const NONE: Id = 0;
const FALSE: Id = 1;
const TRUE: Id = 2;

impl Machine<'_> {
    fn error(&self, kind: Kind, detail: impl Into<String>) -> Error {
        Error::new(kind, detail).byte(self.op_at as u64)
    }

    fn malformed(&self, detail: impl Into<String>) -> Error {
        self.error(Kind::Format, detail)
    }

    fn spend(&mut self, bytes: usize) -> Result<()> {
        self.spent = self.spent.saturating_add(bytes);
        if self.spent > self.allowed {
            return Err(self.malformed(format!(
                "its values take more than {} bytes beside the arrays: no shard of activations is like that",
                self.allowed
            )));
        }
        Ok(())
    }

    fn take(&mut self, n: usize) -> Result<Range<usize>> {
        let end = self.pos.checked_add(n).filter(|end| *end <= self.input.len());
        let Some(end) = end else {
            return Err(self.error(
                Kind::Truncated,
                format!(
                    "the pickle ends in the middle: expected {n} more bytes, found {}",
                    self.input.len() - self.pos
                ),
            ));
        };
        let range = self.pos..end;
        self.pos = end;
        Ok(range)
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N]> {
        let range = self.take(N)?;
        let mut made = [0; N];
        made.copy_from_slice(&self.input[range]);
        Ok(made)
    }

    /// A length of 8 bytes that must fit what is left.
    fn long_length(&mut self) -> Result<usize> {
        let n = u64::from_le_bytes(self.bytes()?);
        let left = (self.input.len() - self.pos) as u64;
        if n > left {
            return Err(self.error(Kind::Truncated, format!("a length of {n} bytes, with {left} left in the pickle")));
        }
        Ok(n as usize)
    }

    fn line(&mut self) -> Result<Range<usize>> {
        let rest = &self.input[self.pos..];
        let Some(n) = rest.iter().position(|b| *b == b'\n') else {
            return Err(self.error(Kind::Truncated, "the pickle ends in the middle of a line"));
        };
        let range = self.pos..self.pos + n;
        self.pos += n + 1;
        Ok(range)
    }

    fn push(&mut self, cell: Cell) -> Result<()> {
        self.spend(size_of::<Cell>() + size_of::<Id>())?;
        let id = Id::try_from(self.cells.len()).map_err(|_| self.malformed("more than 2^32 values"))?;
        self.cells.push(cell);
        self.stack.push(id);
        Ok(())
    }

    fn push_node(&mut self, node: Node) -> Result<()> {
        self.push(Cell::Value(node))
    }

    fn push_id(&mut self, id: Id) -> Result<()> {
        self.spend(size_of::<Id>())?;
        self.stack.push(id);
        Ok(())
    }

    /// Values above the last mark are out of reach until it is popped.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Id> {
        if self.stack.len() <= self.floor() {
            return Err(self.malformed("takes a value from an empty stack"));
        }
        self.stack.pop().ok_or_else(|| self.malformed("takes a value from an empty stack"))
    }

    fn top(&self) -> Result<Id> {
        let above = self.stack.len() > self.floor();
        self.stack.last().copied().filter(|_| above).ok_or_else(|| self.malformed("looks at an empty stack"))
    }

    fn pop_mark(&mut self) -> Result<Vec<Id>> {
        let at = self.marks.pop().ok_or_else(|| self.malformed("needs a mark, found none"))?;
        Ok(self.stack.split_off(at.min(self.stack.len())))
    }

    fn node(&self, id: Id) -> Option<&Node> {
        match self.cells.get(id as usize) {
            Some(Cell::Value(node)) => Some(node),
            _ => None,
        }
    }

    fn blob(&self, blob: &Blob) -> &[u8] {
        (if blob.own { &self.own[..] } else { self.input }).get(blob.range()).unwrap_or_default()
    }

    fn text(&self, id: Id) -> Option<&[u8]> {
        match self.node(id) {
            Some(Node::Str(blob)) => Some(self.blob(blob)),
            _ => None,
        }
    }

    fn run(&mut self) -> Result<Id> {
        loop {
            self.op_at = self.pos;
            let [op] = self.bytes::<1>()?;
            match op {
                b'.' => return self.pop(),
                0x80 => {
                    let [version] = self.bytes()?;
                    if version > 5 {
                        return Err(
                            self.error(Kind::Unsupported, format!("expected pickle protocol 0 to 5, found {version}"))
                        );
                    }
                }
                0x95 => {
                    // A hint for readers of streams; Python's checks that it is no longer than the file.
                    self.long_length()?;
                }
                b'(' => {
                    self.spend(size_of::<usize>())?;
                    self.marks.push(self.stack.len());
                }
                b'0' => {
                    if self.stack.len() > self.floor() {
                        self.pop()?;
                    } else {
                        self.pop_mark()?;
                    }
                }
                b'1' => {
                    self.pop_mark()?;
                }
                b'2' => {
                    let id = self.top()?;
                    self.push_id(id)?;
                }
                b'N' => self.push_id(NONE)?,
                0x88 => self.push_id(TRUE)?,
                0x89 => self.push_id(FALSE)?,
                b'K' => {
                    let [n] = self.bytes()?;
                    self.push_node(Node::Int(i64::from(n)))?;
                }
                b'M' => {
                    let n = u16::from_le_bytes(self.bytes()?);
                    self.push_node(Node::Int(i64::from(n)))?;
                }
                b'J' => {
                    let n = i32::from_le_bytes(self.bytes()?);
                    self.push_node(Node::Int(i64::from(n)))?;
                }
                b'I' | b'L' => self.text_integer(op)?,
                0x8a => {
                    let [n] = self.bytes()?;
                    let range = self.take(usize::from(n))?;
                    self.long(range)?;
                }
                0x8b => {
                    let n = i32::from_le_bytes(self.bytes()?);
                    let Ok(n) = usize::try_from(n) else {
                        return Err(self.malformed(format!("an integer of {n} bytes")));
                    };
                    let range = self.take(n)?;
                    self.long(range)?;
                }
                b'F' => {
                    let range = self.line()?;
                    let value = std::str::from_utf8(&self.input[range]).ok().and_then(|s| s.trim().parse().ok());
                    let value = value.ok_or_else(|| self.malformed("expected a float"))?;
                    self.push_node(Node::Float(value))?;
                }
                b'G' => {
                    let value = f64::from_be_bytes(self.bytes()?);
                    self.push_node(Node::Float(value))?;
                }
                b'S' => self.quoted()?,
                b'T' | b'U' => {
                    let n = match op {
                        b'U' => usize::from(self.bytes::<1>()?[0]),
                        _ => usize::try_from(i32::from_le_bytes(self.bytes()?))
                            .map_err(|_| self.malformed("a string of a negative length"))?,
                    };
                    let range = self.take(n)?;
                    self.python2_string(Blob::new(false, range))?;
                }
                b'V' => self.escaped()?,
                b'X' => {
                    let n = u32::from_le_bytes(self.bytes()?) as usize;
                    self.string(n)?;
                }
                0x8c => {
                    let [n] = self.bytes()?;
                    self.string(usize::from(n))?;
                }
                0x8d => {
                    let n = self.long_length()?;
                    self.string(n)?;
                }
                b'B' => {
                    let n = u32::from_le_bytes(self.bytes()?) as usize;
                    let range = self.take(n)?;
                    self.push_node(Node::Bytes(Blob::new(false, range)))?;
                }
                b'C' => {
                    let [n] = self.bytes()?;
                    let range = self.take(usize::from(n))?;
                    self.push_node(Node::Bytes(Blob::new(false, range)))?;
                }
                0x8e => {
                    let n = self.long_length()?;
                    let range = self.take(n)?;
                    self.push_node(Node::Bytes(Blob::new(false, range)))?;
                }
                0x96 => {
                    let n = self.long_length()?;
                    let range = self.take(n)?;
                    self.push_node(Node::ByteArray(Blob::new(false, range)))?;
                }
                b']' => self.push_node(Node::List(vec![]))?,
                b')' => self.push_node(Node::Tuple(vec![]))?,
                b'}' => self.push_node(Node::Dict(vec![]))?,
                b'l' => {
                    let items = self.pop_mark()?;
                    self.push_node(Node::List(items))?;
                }
                b't' => {
                    let items = self.pop_mark()?;
                    self.push_node(Node::Tuple(items))?;
                }
                b'd' => {
                    let items = self.pop_mark()?;
                    let pairs = self.pairs(&items)?;
                    self.push_node(Node::Dict(pairs))?;
                }
                0x85..=0x87 => {
                    let n = usize::from(op - 0x84);
                    self.spend(n * size_of::<Id>())?;
                    let mut items = vec![0; n];
                    for slot in items.iter_mut().rev() {
                        *slot = self.pop()?;
                    }
                    self.push_node(Node::Tuple(items))?;
                }
                b'a' => {
                    let item = self.pop()?;
                    self.extend_list(&[item])?;
                }
                b'e' => {
                    let items = self.pop_mark()?;
                    self.extend_list(&items)?;
                }
                b's' => {
                    let value = self.pop()?;
                    let key = self.pop()?;
                    self.extend_dict(&[key, value])?;
                }
                b'u' => {
                    let items = self.pop_mark()?;
                    self.extend_dict(&items)?;
                }
                b'p' | b'g' => {
                    let range = self.line()?;
                    let number = std::str::from_utf8(&self.input[range]).ok().and_then(|s| s.parse::<u32>().ok());
                    let number = number.ok_or_else(|| self.malformed("expected the number of a memo"))?;
                    if op == b'p' { self.put(number)? } else { self.get(number)? }
                }
                b'q' => {
                    let [n] = self.bytes()?;
                    self.put(u32::from(n))?;
                }
                b'r' => {
                    let n = u32::from_le_bytes(self.bytes()?);
                    self.put(n)?;
                }
                0x94 => {
                    let n = u32::try_from(self.memo.len()).map_err(|_| self.malformed("more than 2^32 memos"))?;
                    self.put(n)?;
                }
                b'h' => {
                    let [n] = self.bytes()?;
                    self.get(u32::from(n))?;
                }
                b'j' => {
                    let n = u32::from_le_bytes(self.bytes()?);
                    self.get(n)?;
                }
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    self.global(Blob::new(false, module), Blob::new(false, name))?;
                }
                0x93 => {
                    let (name, module) = (self.pop()?, self.pop()?);
                    match (self.node(module), self.node(name)) {
                        (Some(Node::Str(module)), Some(Node::Str(name))) => {
                            let (module, name) = (*module, *name);
                            self.global(module, name)?;
                        }
                        _ => return Err(self.malformed("a global whose name is no string")),
                    }
                }
                b'R' => {
                    let (arguments, function) = (self.pop()?, self.pop()?);
                    self.reduce(function, arguments)?;
                }
                b'b' => {
                    let (state, target) = (self.pop()?, self.top()?);
                    self.build(target, state)?;
                }
                _ => return Err(self.forbidden(op)),
            }
        }
    }

    /// An opcode that is not for data.
    fn forbidden(&self, op: u8) -> Error {
        let name = match op {
            b'i' => "INST",
            b'o' => "OBJ",
            0x81 => "NEWOBJ",
            0x92 => "NEWOBJ_EX",
            b'P' => "PERSID",
            b'Q' => "BINPERSID",
            0x82 => "EXT1",
            0x83 => "EXT2",
            0x84 => "EXT4",
            0x97 => "NEXT_BUFFER",
            0x98 => "READONLY_BUFFER",
            0x8f => "EMPTY_SET",
            0x90 => "ADDITEMS",
            0x91 => "FROZENSET",
            _ => return self.malformed(format!("expected a pickle opcode, found the byte 0x{op:02x}")),
        };
        self.error(
            Kind::UnsafePickle,
            format!("the opcode {name} builds objects; only plain data and numpy arrays are read"),
        )
    }

    fn global(&mut self, module: Blob, name: Blob) -> Result<()> {
        let (module, name) = (self.blob(&module), self.blob(&name));
        match global(module, name) {
            Some(known) => self.push(Cell::Global(known)),
            None => {
                let shown = |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(100)]).into_owned();
                Err(self.error(
                    Kind::UnsafePickle,
                    format!(
                        "names the global {}.{}, which is not among those that numpy arrays need; nothing was imported or run",
                        shown(module),
                        shown(name)
                    ),
                ))
            }
        }
    }

    fn reduce(&mut self, function: Id, arguments: Id) -> Result<()> {
        let Some(Cell::Global(function)) = self.cells.get(function as usize) else {
            return Err(self.error(Kind::UnsafePickle, "calls something that is no function on the list"));
        };
        let function = *function;
        let Some(Node::Tuple(arguments)) = self.node(arguments) else {
            return Err(self.malformed("calls a function with something that is no tuple"));
        };
        let arguments = arguments.clone();
        match (function, &arguments[..]) {
            (Global::Reconstruct, &[class, shape, code]) => {
                let is_ndarray = matches!(self.cells.get(class as usize), Some(Cell::Global(Global::NdArray)));
                let shape_ok = matches!(self.node(shape), Some(Node::Tuple(dims)) if dims.len() == 1)
                    && self.dims(shape)?.iter().all(|n| *n == 0);
                let code_ok = match self.node(code) {
                    Some(Node::Bytes(blob) | Node::Str(blob)) => self.blob(blob) == b"b",
                    _ => false,
                };
                if !is_ndarray {
                    return Err(self.error(Kind::UnsafePickle, "reconstructs something other than numpy.ndarray"));
                }
                if !shape_ok || !code_ok {
                    return Err(self.malformed("expected _reconstruct(ndarray, (0,), b'b')"));
                }
                self.push(Cell::Shell)
            }
            (Global::FromBuffer, &[buffer, element, shape, order]) => {
                let fortran = match self.text(order) {
                    Some(b"C") => false,
                    Some(b"F") => true,
                    _ => return Err(self.malformed("expected the order 'C' or 'F'")),
                };
                let array = self.array(shape, element, fortran, buffer)?;
                self.push_node(array)
            }
            (Global::Dtype, [code, ..]) if arguments.len() <= 3 => {
                let element = self.element(*code)?;
                self.push_node(Node::Element(element))
            }
            (Global::Encode, &[text, encoding]) => {
                if self.text(encoding) != Some(b"latin1") {
                    return Err(self.error(Kind::UnsafePickle, "encodes in something other than 'latin1'"));
                }
                self.encode_latin1(text)
            }
            (Global::Scalar, &[element, bytes]) => {
                let (Some(Node::Element(element)), Some(Node::Bytes(blob))) = (self.node(element), self.node(bytes))
                else {
                    return Err(self.malformed("expected scalar(dtype, bytes)"));
                };
                let (element, blob) = (*element, *blob);
                if element.dtype.size().map(|n| n as u64) != Some(blob.len()) {
                    return Err(self.malformed(format!("a numpy scalar of {} bytes", blob.len())));
                }
                self.push_node(Node::Scalar(element, blob))
            }
            (Global::EmptyBytes, []) => self.push_node(Node::Bytes(Blob::new(false, 0..0))),
            (Global::NdArray | Global::EmptyBytes, _) => {
                Err(self.error(Kind::UnsafePickle, "calls numpy.ndarray or bytes, which only build empty things here"))
            }
            _ => Err(self.malformed(format!("calls {function:?} with {} arguments", arguments.len()))),
        }
    }

    fn build(&mut self, target: Id, state: Id) -> Result<()> {
        let Some(Node::Tuple(state)) = self.node(state) else {
            return Err(self.error(Kind::UnsafePickle, "sets the state of an object with something that is no tuple"));
        };
        let state = state.clone();
        let made = match (self.cells.get(target as usize), &state[..]) {
            (Some(Cell::Shell), &[version, shape, element, fortran, data]) => {
                let fortran = match self.node(fortran) {
                    Some(Node::Bool(fortran)) => *fortran,
                    Some(Node::Int(n)) if *n == 0 || *n == 1 => *n == 1,
                    _ => return Err(self.malformed("an array whose order is no bool")),
                };
                if !matches!(self.node(version), Some(Node::Int(_))) {
                    return Err(self.malformed("an array state without a version"));
                }
                self.array(shape, element, fortran, data)?
            }
            (Some(Cell::Value(Node::Element(element))), &[version, order, subtype, names, fields, ..])
                if (8..=9).contains(&state.len()) =>
            {
                let plain = [subtype, names, fields].iter().all(|id| matches!(self.node(*id), Some(Node::None)));
                if !plain || !matches!(self.node(version), Some(Node::Int(_))) {
                    return Err(self.error(Kind::Unsupported, "a structured element type"));
                }
                let swapped = match self.text(order) {
                    Some(b"<" | b"=" | b"|") => false,
                    Some(b">") => element.dtype.bits() > 8,
                    _ => return Err(self.malformed("an element type of unknown byte order")),
                };
                Node::Element(Element { dtype: element.dtype, swapped })
            }
            _ => return Err(self.error(Kind::UnsafePickle, "sets the state of an object that is no numpy array")),
        };
        // In place: the object may be in the memo already.
        self.cells[target as usize] = Cell::Value(made);
        Ok(())
    }

    fn element(&self, code: Id) -> Result<Element> {
        let text = self.text(code).ok_or_else(|| self.malformed("an element type that is no string"))?;
        let (swapped, bare) = match text {
            [b'>', rest @ ..] => (true, rest),
            [b'<' | b'=' | b'|', rest @ ..] => (false, rest),
            _ => (false, text),
        };
        let dtype = match bare {
            b"f2" => DType::F16,
            b"f4" => DType::F32,
            b"f8" => DType::F64,
            b"b1" => DType::Bool,
            b"i1" => DType::I8,
            b"i2" => DType::I16,
            b"i4" => DType::I32,
            b"i8" => DType::I64,
            b"u1" => DType::U8,
            b"u2" => DType::U16,
            b"u4" => DType::U32,
            b"u8" => DType::U64,
            b"c8" => DType::C64,
            _ => {
                let shown = String::from_utf8_lossy(&text[..text.len().min(40)]).into_owned();
                return Err(self.error(Kind::Unsupported, format!("elements of type '{shown}' are not read")));
            }
        };
        Ok(Element { dtype, swapped: swapped && dtype.bits() > 8 })
    }

    fn dims(&self, shape: Id) -> Result<Vec<u64>> {
        let (Some(Node::Tuple(dims) | Node::List(dims)), 0..=8) = (self.node(shape), self.count(shape)) else {
            return Err(self.malformed("expected a shape: a tuple of at most 8 integers"));
        };
        dims.iter()
            .map(|id| {
                let n = match self.node(*id) {
                    Some(Node::Int(n)) => u64::try_from(*n).ok(),
                    Some(Node::Scalar(element, blob)) => {
                        super::scalar_integer(*element, self.blob(blob)).and_then(|n| u64::try_from(n).ok())
                    }
                    _ => None,
                };
                n.ok_or_else(|| self.malformed("expected a shape of integers from 0 up"))
            })
            .collect()
    }

    fn count(&self, id: Id) -> usize {
        match self.node(id) {
            Some(Node::Tuple(items) | Node::List(items)) => items.len(),
            _ => 0,
        }
    }

    fn array(&mut self, shape: Id, element: Id, fortran: bool, data: Id) -> Result<Node> {
        let shape = self.dims(shape)?;
        let Some(Node::Element(element)) = self.node(element) else {
            return Err(self.malformed("an array whose element type is none"));
        };
        let element = *element;
        let Some(Node::Bytes(data) | Node::ByteArray(data)) = self.node(data) else {
            return Err(self.malformed("an array whose contents are no bytes"));
        };
        let data = *data;
        let size = element.dtype.size().unwrap_or(0) as u64;
        let needed = shape.iter().try_fold(size, |n, d| n.checked_mul(*d));
        if needed != Some(data.len()) {
            return Err(self.malformed(format!(
                "an array of shape {shape:?} and {size}-byte elements, over {} bytes of data",
                data.len()
            )));
        }
        self.spend(size_of::<Array>() + shape.len() * 8)?;
        Ok(Node::Array(Box::new(Array { element, shape, fortran, data })))
    }

    fn put(&mut self, number: u32) -> Result<()> {
        let id = self.top()?;
        self.spend(4 * size_of::<Id>())?;
        self.memo.insert(number, id);
        Ok(())
    }

    fn get(&mut self, number: u32) -> Result<()> {
        let id =
            self.memo.get(&number).copied().ok_or_else(|| self.malformed(format!("memo {number} was never set")))?;
        self.push_id(id)
    }

    fn pairs(&mut self, items: &[Id]) -> Result<Vec<(Id, Id)>> {
        if !items.len().is_multiple_of(2) {
            return Err(self.malformed("a dict with a key and no value"));
        }
        self.spend(size_of_val(items))?;
        // Keys are compared and hashed by whoever reads this: only such as cost nothing to compare.
        let plain = |id: Id| {
            matches!(
                self.node(id),
                Some(Node::Str(_) | Node::Int(_) | Node::Bool(_) | Node::None | Node::Float(_) | Node::Bytes(_))
            )
        };
        if !items.chunks_exact(2).all(|pair| plain(pair[0])) {
            return Err(self.malformed("a dict key that is neither a string nor a number"));
        }
        Ok(items.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect())
    }

    fn extend_dict(&mut self, items: &[Id]) -> Result<()> {
        let pairs = self.pairs(items)?;
        let target = self.top()?;
        match self.cells.get_mut(target as usize) {
            Some(Cell::Value(Node::Dict(dict))) => {
                dict.extend_from_slice(&pairs);
                Ok(())
            }
            _ => Err(self.malformed("sets an item of something that is no dict")),
        }
    }

    fn extend_list(&mut self, items: &[Id]) -> Result<()> {
        self.spend(size_of_val(items))?;
        let target = self.top()?;
        match self.cells.get_mut(target as usize) {
            Some(Cell::Value(Node::List(list))) => {
                list.extend_from_slice(items);
                Ok(())
            }
            _ => Err(self.malformed("appends to something that is no list")),
        }
    }

    fn string(&mut self, n: usize) -> Result<()> {
        let range = self.take(n)?;
        if !is_python_utf8(&self.input[range.clone()]) {
            return Err(self.malformed("a string that is no UTF-8"));
        }
        self.push_node(Node::Str(Blob::new(false, range)))
    }

    /// Protocols 0 to 2 of Python 2; a stock reader takes them for ASCII.
    fn python2_string(&mut self, blob: Blob) -> Result<()> {
        if !self.blob(&blob).is_ascii() {
            return Err(self.error(Kind::Unsupported, "a string of Python 2 that is not ASCII"));
        }
        self.push_node(Node::Str(blob))
    }

    fn quoted(&mut self) -> Result<()> {
        let range = self.line()?;
        let line = &self.input[range.clone()];
        let quote = line.first().copied().filter(|q| matches!(q, b'\'' | b'"'));
        let plain = line.len() >= 2 && quote.is_some() && line.last().copied() == quote;
        if !plain || line[1..line.len() - 1].contains(&b'\\') {
            return Err(self.error(Kind::Unsupported, "a quoted string with escapes"));
        }
        self.python2_string(Blob::new(false, range.start + 1..range.end - 1))
    }

    fn keep(&mut self, bytes: &[u8]) -> Blob {
        let start = self.own.len();
        self.own.extend_from_slice(bytes);
        Blob::new(true, start..self.own.len())
    }

    /// Protocol 0's text: latin-1 in which \uXXXX and \UXXXXXXXX stand for others ("raw-unicode-escape").
    fn escaped(&mut self) -> Result<()> {
        let range = self.line()?;
        let line = &self.input[range];
        let mut made: Vec<u8> = Vec::with_capacity(line.len());
        let mut at = 0;
        while at < line.len() {
            // As CPython: \u and \U count wherever they stand after an even number of backslashes, which stay.
            if line[at] == b'\\' && matches!(line.get(at + 1), Some(b'u' | b'U')) {
                let digits = if line[at + 1] == b'u' { 4 } else { 8 };
                let code = line
                    .get(at + 2..at + 2 + digits)
                    .filter(|d| d.iter().all(u8::is_ascii_hexdigit))
                    .and_then(|d| std::str::from_utf8(d).ok())
                    .and_then(|d| u32::from_str_radix(d, 16).ok())
                    .filter(|c| *c <= 0x10_ffff)
                    .ok_or_else(|| self.malformed("a string with a broken escape"))?;
                push_utf8(&mut made, code);
                at += 2 + digits;
            } else if line[at] == b'\\' && line.get(at + 1) == Some(&b'\\') {
                made.extend_from_slice(b"\\\\");
                at += 2;
            } else {
                push_utf8(&mut made, u32::from(line[at]));
                at += 1;
            }
        }
        self.spend(made.len())?;
        let blob = self.keep(&made);
        self.push_node(Node::Str(blob))
    }

    fn encode_latin1(&mut self, text: Id) -> Result<()> {
        let utf8 = self.text(text).ok_or_else(|| self.malformed("encodes something that is no string"))?;
        let mut made = Vec::with_capacity(utf8.len());
        let mut at = 0;
        while at < utf8.len() {
            match utf8[at..] {
                [a, ..] if a < 0x80 => {
                    made.push(a);
                    at += 1;
                }
                [a @ (0xc2 | 0xc3), b, ..] => {
                    made.push((a & 3) << 6 | (b & 0x3f));
                    at += 2;
                }
                _ => return Err(self.malformed("a string that latin-1 cannot encode")),
            }
        }
        // A string in the memo can be encoded over and over.
        self.spend(made.len())?;
        let blob = self.keep(&made);
        self.push_node(Node::Bytes(blob))
    }

    fn text_integer(&mut self, op: u8) -> Result<()> {
        let range = self.line()?;
        let line = &self.input[range];
        match (op, line) {
            (b'I', b"00") => return self.push_id(FALSE),
            (b'I', b"01") => return self.push_id(TRUE),
            _ => {}
        }
        let text = if op == b'L' { line.strip_suffix(b"L").unwrap_or(line) } else { line };
        let digits = text.strip_prefix(b"-").unwrap_or(text);
        if digits.is_empty() || digits.len() > MAX_INT_BYTES || !digits.iter().all(u8::is_ascii_digit) {
            return Err(self.malformed("expected an integer"));
        }
        let value = std::str::from_utf8(text).ok().and_then(|t| t.parse().ok());
        match value {
            Some(value) => self.push_node(Node::Int(value)),
            None => {
                let bytes = big_from_decimal(digits, text.starts_with(b"-"));
                let blob = self.keep(&bytes);
                self.push_node(Node::Big(blob))
            }
        }
    }

    fn long(&mut self, range: Range<usize>) -> Result<()> {
        if range.len() > MAX_INT_BYTES {
            return Err(self.malformed(format!("an integer of {} bytes", range.len())));
        }
        let bytes = &self.input[range.clone()];
        if bytes.len() > 8 {
            return self.push_node(Node::Big(Blob::new(false, range)));
        }
        let fill = if bytes.last().is_some_and(|b| b & 0x80 != 0) { 0xff } else { 0 };
        let mut wide = [fill; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        self.push_node(Node::Int(i64::from_le_bytes(wide)))
    }
}

/// Decimal digits as little-endian two's complement. Quadratic, and at most [`MAX_INT_BYTES`] digits.
fn big_from_decimal(digits: &[u8], negative: bool) -> Vec<u8> {
    let mut bytes: Vec<u8> = vec![];
    for digit in digits {
        let mut carry = u32::from(digit - b'0');
        for byte in &mut bytes {
            carry += u32::from(*byte) * 10;
            *byte = carry as u8;
            carry >>= 8;
        }
        if carry > 0 {
            bytes.push(carry as u8);
        }
    }
    bytes.push(0);
    if negative {
        let mut carry = true;
        for byte in &mut bytes {
            let (flipped, over) = (!*byte).overflowing_add(u8::from(carry));
            *byte = flipped;
            carry = over;
        }
    }
    bytes
}

/// UTF-8 of any code point, halves of surrogate pairs included: what Python calls "surrogatepass".
fn push_utf8(out: &mut Vec<u8>, code: u32) {
    match code {
        0..0x80 => out.push(code as u8),
        0x80..0x800 => out.extend_from_slice(&[0xc0 | (code >> 6) as u8, 0x80 | (code & 0x3f) as u8]),
        0x800..0x1_0000 => {
            out.extend_from_slice(&[
                0xe0 | (code >> 12) as u8,
                0x80 | (code >> 6 & 0x3f) as u8,
                0x80 | (code & 0x3f) as u8,
            ]);
        }
        _ => out.extend_from_slice(&[
            0xf0 | (code >> 18) as u8,
            0x80 | (code >> 12 & 0x3f) as u8,
            0x80 | (code >> 6 & 0x3f) as u8,
            0x80 | (code & 0x3f) as u8,
        ]),
    }
}

/// UTF-8, or UTF-8 with encoded surrogates in it.
fn is_python_utf8(mut bytes: &[u8]) -> bool {
    loop {
        match std::str::from_utf8(bytes) {
            Ok(_) => return true,
            Err(error) => match bytes[error.valid_up_to()..] {
                [0xed, 0xa0..=0xbf, 0x80..=0xbf, ..] => bytes = &bytes[error.valid_up_to() + 3..],
                _ => return false,
            },
        }
    }
}
