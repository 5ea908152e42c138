//! Tensors in the pickles of `torch.save`.
//!
//! A tensor is a call of a rebuilding function with a storage, which is a persistent id: `("storage", type, key, location,
//! count)`. No function is called; its name decides which arguments are expected. Objects that only torch can make (sparse,
//! quantised, complex, meta tensors, subclasses) become [`Node::Refused`], so that the rest of the file stays readable.
//!
//! Source: torch/_utils.py, torch/serialization.py and torch/_weights_only_unpickler.py of torch 2.15.

use super::super::{Blob, Id, Node, SavedStorage, SavedTensor};
use super::names::{TorchName, is_refused, torch_name};
use super::{Dialect, Global, Machine, Operand};
use crate::dtype::{DType, Spelling};
use crate::error::{Kind, Result};

/// Limit on the axes of a tensor: torch's own is 64.
const MAX_AXES: usize = 64;

/// The element type of a dtype's name.
fn dtype_named(name: &[u8]) -> Option<DType> {
    std::str::from_utf8(name).ok().and_then(|name| Spelling::of_name(name).dtype())
}

/// A tensor's arguments, in torch's order.
struct Rebuilt {
    storage: Id,
    offset: Id,
    size: Id,
    stride: Id,
    hooks: Option<Id>,
    dtype: Option<Id>,
    metadata: Option<Id>,
}

impl Machine<'_> {
    /// Pushes a name of torch; false for any other name.
    pub(super) fn torch_global(&mut self, module: Blob, name: Blob) -> Result<bool> {
        let (module, name) = (self.blob(&module).to_vec(), self.blob(&name).to_vec());
        if let Some(known) = torch_name(&module, &name) {
            self.push(Operand::Global(Global::Torch(known)))?;
            return Ok(true);
        }
        let refused = is_refused(&module, &name);
        if !refused && (module != b"torch" || dtype_named(&name).is_none()) {
            return Ok(false);
        }
        let whole = String::from_utf8_lossy(&[&module[..], b".", &name[..]].concat()).into_owned();
        let node = match self.refused(&whole, None)? {
            Node::Refused(object) if !refused => Node::Name(object.name),
            node => node,
        };
        self.push_node(node)?;
        Ok(true)
    }

    /// Runs an opcode that only torch's files may use; false for any other opcode.
    pub(super) fn torch_opcode(&mut self, op: u8) -> Result<bool> {
        match op {
            b'Q' => {
                let id = self.pop()?;
                self.persistent(id)?;
            }
            0x8f => self.push_node(Node::Set(vec![]))?,
            0x90 => {
                let items = self.pop_mark()?;
                self.spend(size_of_val(&items[..]))?;
                let target = self.top()?;
                match self.cells.get_mut(target as usize) {
                    Some(Operand::Value(Node::Set(set))) => set.extend_from_slice(&items),
                    Some(Operand::Value(Node::Refused(_))) => {}
                    _ => return Err(self.malformed("expected a set to add to, found another type")),
                }
            }
            0x91 => {
                let items = self.pop_mark()?;
                self.push_node(Node::Set(items))?;
            }
            // INST: the name of a class, and arguments after a mark.
            b'i' => {
                let (module, name) = (self.line()?, self.line()?);
                self.pop_mark()?;
                let whole = [&self.input[module], b".", &self.input[name]].concat();
                let refused = self.refused(&String::from_utf8_lossy(&whole), Some(self.op_at as u64))?;
                self.push_node(refused)?;
            }
            // OBJ: a class and arguments after a mark.
            b'o' => {
                let items = self.pop_mark()?;
                let class = *items.first().ok_or_else(|| self.malformed("expected a class to make an object of"))?;
                self.new_object(class, op)?;
            }
            // NEWOBJ and NEWOBJ_EX: a class, its arguments, in NEWOBJ_EX its keyword arguments.
            0x81 | 0x92 => {
                for _ in 0..if op == 0x81 { 1 } else { 2 } {
                    self.pop()?;
                }
                let class = self.pop()?;
                self.new_object(class, op)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// An object of a class: refused, whatever the class.
    fn new_object(&mut self, class: Id, op: u8) -> Result<()> {
        let refused = match self.cells.get(class as usize) {
            Some(Operand::Value(Node::Refused(object))) => Node::Refused(*object),
            Some(Operand::Global(name)) => {
                let name = *name;
                self.refused(&format!("an object of {name:?}"), None)?
            }
            _ => return Err(self.forbidden(op)),
        };
        self.push_node(refused)
    }

    /// A storage: `("storage", type, key, location, count)`, in old files with a sixth member.
    fn persistent(&mut self, id: Id) -> Result<()> {
        let expected = "expected a persistent id (\"storage\", type, key, location, count)";
        let Some(Node::Tuple(parts)) = self.node(id) else {
            return Err(self.error(Kind::UnsafePickle, format!("{expected}, found another type")));
        };
        let (kind, class, key, location, count, view) = match parts[..] {
            [kind, class, key, location, count] => (kind, class, key, location, count, None),
            [kind, class, key, location, count, view] => (kind, class, key, location, count, Some(view)),
            _ => return Err(self.error(Kind::UnsafePickle, format!("{expected}, found {} members", parts.len()))),
        };
        if self.text(kind) != Some(b"storage") {
            return Err(self.error(Kind::UnsafePickle, format!("{expected}, found another kind")));
        }
        let dtype = match self.cells.get(class as usize) {
            Some(Operand::Global(Global::Torch(TorchName::Storage(dtype)))) => *dtype,
            Some(Operand::Value(Node::Refused(name))) => {
                let refused = Node::Refused(*name);
                return self.push_node(refused);
            }
            _ => return Err(self.error(Kind::UnsafePickle, format!("{expected}, found another type of storage"))),
        };
        let (Some(Node::Str(key)), Some(Node::Str(_))) = (self.node(key), self.node(location)) else {
            return Err(self.malformed("expected strings as a storage's key and location"));
        };
        let key = *key;
        let count = self.natural(count, "a storage's number of elements")?;
        let part = match view.map(|view| (view, self.node(view))) {
            None | Some((_, Some(Node::None))) => None,
            Some((_, Some(Node::Tuple(view)))) if view.len() == 3 => {
                let (first, elements) = (view[1], view[2]);
                Some((self.natural(first, "a view's offset")?, self.natural(elements, "a view's size")?))
            }
            Some(_) => return Err(self.malformed("expected None or (key, offset, size) as the view of a storage")),
        };
        let storage = SavedStorage { key, dtype, count, part };
        if count.checked_mul(storage.item()).is_none() {
            return Err(self.malformed(format!("a storage of {count} elements: its size overflows 64 bits")));
        }
        self.spend(size_of::<SavedStorage>())?;
        let number = u32::try_from(self.storages.len()).map_err(|_| self.malformed("more than 2^32 storages"))?;
        self.storages.push(storage);
        self.push_node(Node::Storage(number))
    }

    fn natural(&self, id: Id, what: &str) -> Result<u64> {
        match self.node(id) {
            Some(Node::Int(n)) => u64::try_from(*n).ok(),
            _ => None,
        }
        .ok_or_else(|| self.malformed(format!("{what}: expected an integer from 0 up")))
    }

    fn naturals(&mut self, id: Id, what: &str) -> Result<Vec<u64>> {
        let (Some(Node::Tuple(items) | Node::List(items)), 0..=MAX_AXES) = (self.node(id), self.length(id)) else {
            return Err(self.malformed(format!("{what}: expected a tuple of at most {MAX_AXES} integers")));
        };
        let items = items.clone();
        self.spend(items.len() * 8)?;
        items.into_iter().map(|id| self.natural(id, what)).collect()
    }

    fn length(&self, id: Id) -> usize {
        match self.node(id) {
            Some(Node::Tuple(items) | Node::List(items)) => items.len(),
            _ => 0,
        }
    }

    /// The value of a call. Arguments that do not change the elements are ignored: any global in them was one of the
    /// permitted names already.
    pub(super) fn torch_call(&mut self, name: TorchName, arguments: Id) -> Result<()> {
        let Some(Node::Tuple(arguments)) = self.node(arguments) else {
            return Err(self.malformed("expected a tuple of arguments, found another type"));
        };
        let arguments = arguments.clone();
        match (name, &arguments[..]) {
            (TorchName::Tensor, &[storage, offset, size, stride]) => {
                self.tensor(&Rebuilt { storage, offset, size, stride, hooks: None, dtype: None, metadata: None })
            }
            (TorchName::Tensor, &[storage, offset, size, stride, _, hooks, ref rest @ ..]) if rest.len() <= 1 => {
                let (hooks, metadata) = (Some(hooks), rest.first().copied());
                self.tensor(&Rebuilt { storage, offset, size, stride, hooks, dtype: None, metadata })
            }
            (TorchName::TensorOfDtype, &[storage, offset, size, stride, _, hooks, dtype, ref rest @ ..])
                if rest.len() <= 1 =>
            {
                let (hooks, metadata) = (Some(hooks), rest.first().copied());
                self.tensor(&Rebuilt { storage, offset, size, stride, hooks, dtype: Some(dtype), metadata })
            }
            (TorchName::Parameter, &[tensor, _, _] | &[tensor, _, _, _]) => match self.node(tensor) {
                Some(Node::Tensor(_) | Node::Refused(_)) => self.push_id(tensor),
                _ => Err(self.malformed("expected a tensor as a parameter, found another type")),
            },
            (TorchName::FromType, &[function, class, inner, _]) => self.typed_tensor(function, class, inner),
            (TorchName::Size, &[dims]) if matches!(self.node(dims), Some(Node::Tuple(_))) => self.push_id(dims),
            (TorchName::Device, &[kind] | &[kind, _]) if matches!(self.node(kind), Some(Node::Str(_))) => {
                self.push_id(kind)
            }
            (TorchName::Set, []) => self.push_node(Node::Set(vec![])),
            (TorchName::Set, &[items]) => match self.node(items) {
                Some(Node::List(items) | Node::Tuple(items)) => {
                    let items = items.clone();
                    self.spend(size_of_val(&items[..]))?;
                    self.push_node(Node::Set(items))
                }
                _ => Err(self.malformed("expected a list of a set's items, found another type")),
            },
            _ => Err(self.error(
                Kind::UnsafePickle,
                format!("calls {name:?} of torch with {} arguments, which tensors never do", arguments.len()),
            )),
        }
    }

    /// A tensor with attributes: a rebuilt tensor, if the function is one of the above and the class holds plain elements.
    fn typed_tensor(&mut self, function: Id, class: Id, inner: Id) -> Result<()> {
        if let Some(Node::Refused(name)) = self.node(function) {
            let refused = Node::Refused(*name);
            return self.push_node(refused);
        }
        let function = match self.cells.get(function as usize) {
            Some(Operand::Global(Global::Torch(
                name @ (TorchName::Tensor | TorchName::TensorOfDtype | TorchName::Parameter),
            ))) => *name,
            _ => {
                return Err(self.error(Kind::UnsafePickle, "_rebuild_from_type_v2: expected a function of tensors"));
            }
        };
        match self.cells.get(class as usize) {
            Some(Operand::Global(Global::Torch(TorchName::TensorClass))) => self.torch_call(function, inner),
            Some(Operand::Value(Node::Refused(object))) => {
                let refused = Node::Refused(*object);
                self.push_node(refused)
            }
            _ => {
                Err(self
                    .error(Kind::UnsafePickle, "_rebuild_from_type_v2: expected the class Tensor, Parameter or Buffer"))
            }
        }
    }

    /// An OrderedDict or Counter of a dict or of pairs.
    pub(super) fn dict_of(&mut self, items: Id) -> Result<()> {
        let flat: Vec<Id> = match self.node(items) {
            Some(Node::Dict(pairs)) => pairs.iter().flat_map(|(key, value)| [*key, *value]).collect(),
            Some(Node::List(pairs)) => {
                let pair = |id: &Id| match self.node(*id) {
                    Some(Node::Tuple(pair) | Node::List(pair)) if pair.len() == 2 => Some([pair[0], pair[1]]),
                    _ => None,
                };
                let pairs: Option<Vec<[Id; 2]>> = pairs.iter().map(pair).collect();
                pairs.ok_or_else(|| self.malformed("expected pairs as the items of an OrderedDict"))?.concat()
            }
            _ => return Err(self.malformed("expected a dict or a list of pairs, found another type")),
        };
        let pairs = self.pairs(&flat)?;
        self.push_node(Node::Dict(pairs))
    }

    /// Whether BUILD sets only attributes of a value: `_metadata` of a state dict's OrderedDict, or those of a tensor.
    pub(super) fn torch_ignores_state(&self, target: Id) -> bool {
        debug_assert_eq!(self.dialect, Dialect::Torch);
        matches!(self.node(target), Some(Node::Dict(_) | Node::Tensor(_) | Node::Refused(_)))
    }

    fn tensor(&mut self, arguments: &Rebuilt) -> Result<()> {
        let number = match self.node(arguments.storage) {
            Some(Node::Storage(number)) => *number,
            Some(Node::Refused(name)) => {
                let refused = Node::Refused(*name);
                return self.push_node(refused);
            }
            _ => return Err(self.malformed("expected a storage as a tensor's first argument, found another type")),
        };
        let first = self.natural(arguments.offset, "a tensor's offset")?;
        let shape = self.naturals(arguments.size, "a tensor's size")?;
        let strides = self.naturals(arguments.stride, "a tensor's stride")?;
        if shape.len() != strides.len() {
            return Err(self.malformed(format!(
                "expected a stride for each axis of a tensor, found {} sizes and {} strides",
                shape.len(),
                strides.len()
            )));
        }
        let dtype = match arguments.dtype.map(|id| self.node(id)) {
            None => self.storages.get(number as usize).and_then(|storage| storage.dtype),
            Some(Some(Node::Name(name))) => self.blob(name).strip_prefix(b"torch.").and_then(dtype_named),
            Some(Some(Node::Refused(name))) => {
                let refused = Node::Refused(*name);
                return self.push_node(refused);
            }
            Some(_) => None,
        };
        let dtype = dtype.ok_or_else(|| self.malformed("expected a dtype of torch for a tensor, found none"))?;
        if let Some(refused) = self.changed_by(arguments.metadata)? {
            return self.push_node(refused);
        }
        // torch writes none; an unpickler would build them.
        let has_hooks = match arguments.hooks.map(|id| self.node(id)) {
            None | Some(Some(Node::None)) => false,
            Some(Some(Node::Dict(pairs))) => !pairs.is_empty(),
            Some(_) => true,
        };
        if has_hooks {
            let refused = self.refused("a tensor with hooks", None)?;
            return self.push_node(refused);
        }
        self.spend(size_of::<SavedTensor>())?;
        self.push_node(Node::Tensor(Box::new(SavedTensor { storage: number, dtype, first, shape, strides })))
    }

    /// A refusal for a tensor whose elements are not those stored: its conjugate or negative.
    fn changed_by(&mut self, metadata: Option<Id>) -> Result<Option<Node>> {
        let pairs = match metadata.map(|id| self.node(id)) {
            None | Some(Some(Node::None)) => return Ok(None),
            Some(Some(Node::Dict(pairs))) => pairs,
            Some(_) => return Err(self.malformed("expected a dict as a tensor's metadata, found another type")),
        };
        let set = pairs.iter().find(|(_, value)| !matches!(self.node(*value), Some(Node::Bool(false) | Node::None)));
        let Some((key, _)) = set else { return Ok(None) };
        let key = self.text(*key).unwrap_or_default();
        let key = String::from_utf8_lossy(&key[..key.len().min(40)]).into_owned();
        Ok(Some(self.refused(&format!("a tensor with the flag {key}"), None)?))
    }
}
