//! A pickle interpreter for the opcodes of protocols 0 to 5 that plain data and numpy arrays use, and no others.
//!
//! A standard unpickler imports and calls any name in the file. Lists of allowed module *prefixes* do not help: numpy's own
//! modules reach everything, and from protocol 4 a name may be a dotted path. Here a global must equal one of the
//! (module, name) pairs in `global`; it is never imported, and only decides which opcodes may follow. Memory is counted
//! before it is allocated, and limited to a fixed amount plus four times the input.
//!
//! Files of torch need more names ([`Dialect::Torch`]): `torch` lists them, again as whole pairs. What any other name builds is
//! one [`Node::Refused`], so that the tensors next to it stay readable.
//!
//! This file has the stack and the opcodes; `arrays` the permitted calls, `text` the text forms of old protocols.

mod arrays;
mod names;
mod text;
mod torch;
mod utf8;

use std::collections::HashMap;
use std::ops::Range;

use self::names::TorchName;
use self::utf8::is_python_utf8;
use super::{Blob, Id, Node, Refusal, SavedStorage, Tree};
use crate::dtype::{DType, Spelling};
use crate::error::{Error, Kind, Result};
use crate::number::to_usize;
use crate::parse::end;

/// Memory for values in addition to the input: this, plus four times the input.
const MEMORY: usize = 24 << 20;
/// Limit on the digits and bytes of an integer; counts and labels are far smaller.
const MAX_INT_BYTES: usize = 1024;
/// Limit on the name of a refused object.
const MAX_NAME: usize = 200;
/// Limit on the members of a tuple that is a key of a dict.
const MAX_KEY_ITEMS: usize = 8;

/// The content that a pickle may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Plain values and numpy arrays.
    Plain,
    /// Also the tensors of torch, whose storages are outside the pickle.
    Torch,
}

/// The names that data may use. Any unexpected call of them is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Global {
    /// `numpy.core.multiarray._reconstruct`: an array that BUILD will fill.
    Reconstruct,
    /// `numpy.core.numeric._frombuffer`: an array over bytes.
    FromBuffer,
    /// `numpy.dtype`.
    Dtype,
    /// `numpy.ndarray`, only as an argument of `_reconstruct`.
    NdArray,
    /// `_codecs.encode`: protocols 0 to 2 write bytes as text to be encoded in latin-1.
    Encode,
    /// `numpy.core.multiarray.scalar`.
    Scalar,
    /// `bytes`, which protocols 0 to 2 call without arguments for empty bytes.
    EmptyBytes,
    /// `collections.OrderedDict` and `Counter`.
    Dict,
    /// `collections.defaultdict`, read as a dict: its factory is never called.
    DefaultDict,
    /// A type of ml_dtypes, only as the argument of `numpy.dtype`.
    Element(DType),
    /// A class of plain values, only as the factory of a defaultdict.
    Factory,
    /// A name of torch's files.
    Torch(TorchName),
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
        (b"ml_dtypes", name) => {
            Global::Element(std::str::from_utf8(name).ok().and_then(|name| Spelling::of_name(name).dtype())?)
        }
        (b"collections", b"OrderedDict" | b"Counter") => Global::Dict,
        (b"collections", b"defaultdict") => Global::DefaultDict,
        (b"builtins" | b"__builtin__", b"list" | b"dict" | b"tuple" | b"int" | b"float" | b"str" | b"bool") => {
            Global::Factory
        }
        _ => return None,
    })
}

/// A stack entry: a value, or an unfinished one.
#[derive(Clone, Debug)]
enum Operand {
    Value(Node),
    Global(Global),
    /// An array from `_reconstruct` that BUILD has not filled yet.
    Shell,
}

impl<'a> Machine<'a> {
    fn new(input: &'a [u8], dialect: Dialect) -> Machine<'a> {
        Machine {
            input,
            dialect,
            storages: vec![],
            pos: 0,
            op_at: 0,
            cells: vec![
                Operand::Value(Node::None),
                Operand::Value(Node::Bool(false)),
                Operand::Value(Node::Bool(true)),
            ],
            own: vec![],
            stack: vec![],
            marks: vec![],
            memo: HashMap::new(),
            globals: vec![],
            spent: 0,
            allowed: MEMORY.saturating_add(input.len().saturating_mul(4)),
            needs: 0,
        }
    }
}

/// A lower bound on the size of a pickle that begins with `front`: more than `front` if a value extends beyond it. An error if
/// no valid pickle begins this way.
pub fn least(front: &[u8]) -> Result<u64> {
    let mut machine = Machine::new(front, Dialect::Plain);
    match machine.run() {
        Ok(_) => Ok(machine.pos as u64),
        Err(error) if error.kind == Kind::Truncated => Ok(machine.needs.max(front.len() as u64)),
        Err(error) => Err(error),
    }
}

/// Parses a pickle, which ends where `input` ends: Python ignores further objects that were dumped into one file.
pub fn parse(input: &[u8]) -> Result<Tree> {
    let (tree, size) = parse_as(input, Dialect::Plain)?;
    let advice = ": dump all samples as one object, a file contains one";
    end::check(size as u64, input.len() as u64, "the pickle", advice)?;
    Ok(tree)
}

/// [`parse`] in a dialect; also returns the size of the pickle.
pub fn parse_as(input: &[u8], dialect: Dialect) -> Result<(Tree, usize)> {
    let mut machine = Machine::new(input, dialect);
    let root = machine.run()?;
    let size = machine.pos;
    // A class that torch's files know may be a value, too: `{"kind": torch.Tensor}`.
    let unfinished = match dialect {
        Dialect::Plain => Node::Unfinished,
        Dialect::Torch => machine.refused("a class, a function or an array without contents", None)?,
    };
    let nodes = machine
        .cells
        .into_iter()
        .map(|cell| match cell {
            Operand::Value(node) => node,
            Operand::Global(_) | Operand::Shell => unfinished.clone(),
        })
        .collect();
    let (own, storages, globals) = (machine.own, machine.storages, machine.globals);
    Ok((Tree { nodes, own, root, storages, globals }, size))
}

struct Machine<'a> {
    input: &'a [u8],
    dialect: Dialect,
    /// Storages that persistent ids named, without repetition.
    storages: Vec<SavedStorage>,
    pos: usize,
    /// Offset of the current opcode, for errors.
    op_at: usize,
    cells: Vec<Operand>,
    own: Vec<u8>,
    stack: Vec<Id>,
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
    globals: Vec<(Id, u64)>,
    spent: usize,
    allowed: usize,
    /// The end of the value that extends past the input, if any.
    needs: u64,
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
                "its values take more than {} bytes in addition to the arrays, more than any shard of activations needs",
                self.allowed
            )));
        }
        Ok(())
    }

    fn take(&mut self, n: usize) -> Result<Range<usize>> {
        let end = self.pos.checked_add(n).filter(|end| *end <= self.input.len());
        let Some(end) = end else {
            self.needs = (self.pos as u64).saturating_add(n as u64);
            return Err(self.error(
                Kind::Truncated,
                format!("the pickle is truncated: expected {n} more bytes, found {}", self.input.len() - self.pos),
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

    /// Reads an 8-byte length, which must not exceed the remaining input.
    fn long_length(&mut self) -> Result<usize> {
        let n = u64::from_le_bytes(self.bytes()?);
        let left = (self.input.len() - self.pos) as u64;
        if n > left {
            self.needs = (self.pos as u64).saturating_add(n);
            return Err(self.error(Kind::Truncated, format!("expected {n} more bytes, found {left}")));
        }
        Ok(to_usize(n))
    }

    fn line(&mut self) -> Result<Range<usize>> {
        let rest = &self.input[self.pos..];
        let Some(n) = rest.iter().position(|b| *b == b'\n') else {
            return Err(self.error(Kind::Truncated, "the pickle is truncated in a line of text"));
        };
        let range = self.pos..self.pos + n;
        self.pos += n + 1;
        Ok(range)
    }

    fn push(&mut self, cell: Operand) -> Result<()> {
        self.spend(size_of::<Operand>() + size_of::<Id>())?;
        let id = Id::try_from(self.cells.len()).map_err(|_| self.malformed("more than 2^32 values"))?;
        self.cells.push(cell);
        self.stack.push(id);
        Ok(())
    }

    fn push_node(&mut self, node: Node) -> Result<()> {
        self.push(Operand::Value(node))
    }

    fn push_id(&mut self, id: Id) -> Result<()> {
        self.spend(size_of::<Id>())?;
        self.stack.push(id);
        Ok(())
    }

    /// The lowest reachable stack position: values below the last mark cannot be popped.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Id> {
        if self.stack.len() <= self.floor() {
            return Err(self.malformed("pops from an empty stack"));
        }
        self.stack.pop().ok_or_else(|| self.malformed("pops from an empty stack"))
    }

    fn top(&self) -> Result<Id> {
        let above = self.stack.len() > self.floor();
        self.stack.last().copied().filter(|_| above).ok_or_else(|| self.malformed("reads from an empty stack"))
    }

    fn pop_mark(&mut self) -> Result<Vec<Id>> {
        let at = self.marks.pop().ok_or_else(|| self.malformed("expected a mark on the stack, found none"))?;
        Ok(self.stack.split_off(at.min(self.stack.len())))
    }

    fn node(&self, id: Id) -> Option<&Node> {
        match self.cells.get(id as usize) {
            Some(Operand::Value(node)) => Some(node),
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

    // Long: one arm per opcode, most of them a line or two; a second dispatch by kind would cost time per opcode.
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
                    // FRAME is a hint for stream readers; like Python, check that the frame fits the file.
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
                    self.push_bytes(n)?;
                }
                b'C' => {
                    let [n] = self.bytes()?;
                    self.push_bytes(usize::from(n))?;
                }
                0x8e => {
                    let n = self.long_length()?;
                    self.push_bytes(n)?;
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
                    let mut items = [0; 3];
                    for slot in items[..n].iter_mut().rev() {
                        *slot = self.pop()?;
                    }
                    self.push_node(Node::Tuple(items[..n].to_vec()))?;
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
                    let number = number.ok_or_else(|| self.malformed("expected a memo number"))?;
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
                        _ => return Err(self.malformed("expected a string as the name of a global")),
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
                _ if self.dialect == Dialect::Torch && self.torch_opcode(op)? => {}
                _ => return Err(self.forbidden(op)),
            }
        }
    }

    /// The error for an unsupported opcode.
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
            format!("the opcode {name} builds objects; only plain data and {} are supported", self.arrays()),
        )
    }

    /// The arrays of the dialect, for messages.
    fn arrays(&self) -> &'static str {
        match self.dialect {
            Dialect::Plain => "numpy arrays",
            Dialect::Torch => "tensors and numpy arrays",
        }
    }

    fn global(&mut self, module: Blob, name: Blob) -> Result<()> {
        if self.dialect == Dialect::Torch && self.torch_global(module, name)? {
            return Ok(());
        }
        let (module, name) = (self.blob(&module), self.blob(&name));
        match global(module, name) {
            Some(known) => {
                self.spend(size_of::<(Id, u64)>())?;
                let id = Id::try_from(self.cells.len()).unwrap_or(Id::MAX);
                self.globals.push((id, self.op_at as u64));
                self.push(Operand::Global(known))
            }
            None if self.dialect == Dialect::Torch => {
                let whole = String::from_utf8_lossy(&[module, b".", name].concat()).into_owned();
                let refused = self.refused(&whole, Some(self.op_at as u64))?;
                self.push_node(refused)
            }
            None => {
                let shown = |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(100)]).into_owned();
                Err(self.error(
                    Kind::UnsafePickle,
                    format!(
                        "names the global {}.{}, which {} do not need; nothing was imported or run",
                        shown(module),
                        shown(name),
                        self.arrays()
                    ),
                ))
            }
        }
    }

    /// A refused value, described; `global_at` is the offset at which it names a global that no tensor needs.
    fn refused(&mut self, what: &str, global_at: Option<u64>) -> Result<Node> {
        let shown: String = what.chars().take(MAX_NAME).collect();
        self.spend(shown.len())?;
        let start = self.own.len();
        self.own.extend_from_slice(shown.as_bytes());
        Ok(Node::Refused(Refusal { name: Blob::new(true, start..self.own.len()), global_at }))
    }

    fn put(&mut self, number: u32) -> Result<()> {
        let id = self.top()?;
        // A growing hash table doubles, and briefly holds both sizes.
        self.spend(4 * size_of::<(u32, Id)>())?;
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
            return Err(self.malformed("expected a value for every key of a dict, found an odd number of items"));
        }
        self.spend(size_of_val(items))?;
        let mut pairs = Vec::with_capacity(items.len() / 2);
        for pair in items.chunks_exact(2) {
            pairs.push((self.key(pair[0])?, pair[1]));
        }
        Ok(pairs)
    }

    /// A key of a dict. Later readers compare and hash keys, so only types that are cheap to compare are allowed: plain values, and
    /// tuples of a few of them. Any other key of torch's files is refused, but not the values of other keys.
    fn key(&mut self, id: Id) -> Result<Id> {
        let is_plain = |id: Id| {
            matches!(
                self.node(id),
                Some(Node::Str(_) | Node::Int(_) | Node::Bool(_) | Node::None | Node::Float(_) | Node::Bytes(_))
            )
        };
        let is_tuple = |id: Id| match self.node(id) {
            Some(Node::Tuple(items)) => items.len() <= MAX_KEY_ITEMS && items.iter().all(|id| is_plain(*id)),
            _ => false,
        };
        if is_plain(id) || is_tuple(id) || matches!(self.node(id), Some(Node::Refused(_))) {
            return Ok(id);
        }
        let expected = "a string, bytes, a number or a short tuple of them as a dict key";
        if self.dialect == Dialect::Plain {
            return Err(self.malformed(format!("expected {expected}, found another type")));
        }
        let refused = self.refused(&format!("a key that is not {expected}"), None)?;
        self.push_node(refused)?;
        self.pop()
    }

    fn extend_dict(&mut self, items: &[Id]) -> Result<()> {
        let pairs = self.pairs(items)?;
        let target = self.top()?;
        match self.cells.get_mut(target as usize) {
            Some(Operand::Value(Node::Dict(dict))) => {
                dict.extend_from_slice(&pairs);
                Ok(())
            }
            Some(Operand::Value(Node::Refused(_))) => Ok(()),
            _ => Err(self.malformed("expected a dict to set an item of, found another type")),
        }
    }

    fn extend_list(&mut self, items: &[Id]) -> Result<()> {
        self.spend(size_of_val(items))?;
        let target = self.top()?;
        match self.cells.get_mut(target as usize) {
            Some(Operand::Value(Node::List(list))) => {
                list.extend_from_slice(items);
                Ok(())
            }
            Some(Operand::Value(Node::Refused(_))) => Ok(()),
            _ => Err(self.malformed("expected a list to append to, found another type")),
        }
    }

    fn push_bytes(&mut self, n: usize) -> Result<()> {
        let range = self.take(n)?;
        self.push_node(Node::Bytes(Blob::new(false, range)))
    }

    fn string(&mut self, n: usize) -> Result<()> {
        let range = self.take(n)?;
        if !is_python_utf8(&self.input[range.clone()]) {
            return Err(self.malformed("expected a string in UTF-8, found other bytes"));
        }
        self.push_node(Node::Str(Blob::new(false, range)))
    }

    /// A string of Python 2 (protocols 0 to 2); Python 3 decodes it as ASCII.
    fn python2_string(&mut self, blob: Blob) -> Result<()> {
        if !self.blob(&blob).is_ascii() {
            return Err(self.error(Kind::Unsupported, "a string of Python 2 that is not ASCII"));
        }
        self.push_node(Node::Str(blob))
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
