//! The results of REDUCE and BUILD: numpy arrays, dtypes, scalars and bytes, with every shape checked against the data.

use super::super::{Blob, Element, Id, Node, NumpyArray, scalar_integer};
use super::{Dialect, Global, Machine, Operand};
use crate::dtype::Spelling;
use crate::error::{Kind, Result};

impl Machine<'_> {
    pub(super) fn reduce(&mut self, function: Id, arguments: Id) -> Result<()> {
        if let Some(Node::Refused(name)) = self.node(function) {
            let refused = Node::Refused(*name);
            return self.push_node(refused);
        }
        let Some(Operand::Global(function)) = self.cells.get(function as usize) else {
            return Err(self.error(Kind::UnsafePickle, "expected a call of a known function, found another"));
        };
        let function = *function;
        if let Global::Torch(name) = function {
            return self.torch_call(name, arguments);
        }
        let Some(Node::Tuple(arguments)) = self.node(arguments) else {
            return Err(self.malformed("expected a tuple of arguments, found another type"));
        };
        let arguments = arguments.clone();
        match (function, &arguments[..]) {
            (Global::Dict | Global::DefaultDict, []) => self.push_node(Node::Dict(vec![])),
            (Global::Dict, &[items]) => self.dict_of(items),
            (Global::DefaultDict, &[factory, ref rest @ ..]) if rest.len() <= 1 && self.is_factory(factory) => {
                match rest.first() {
                    Some(items) => self.dict_of(*items),
                    None => self.push_node(Node::Dict(vec![])),
                }
            }
            (Global::Reconstruct, &[class, ..]) if matches!(self.node(class), Some(Node::Refused(_))) => {
                self.push_id(class)
            }
            (Global::Reconstruct, &[class, shape, code]) => self.reconstruct(class, shape, code),
            (Global::FromBuffer, &[buffer, element, shape, order]) => {
                let fortran = match self.text(order) {
                    Some(b"C") => false,
                    Some(b"F") => true,
                    _ => return Err(self.malformed("expected the array order 'C' or 'F'")),
                };
                let array = self.array(shape, element, fortran, buffer, true)?;
                self.push_node(array)
            }
            (Global::Dtype, &[code, ..]) if matches!(self.node(code), Some(Node::Refused(_))) => self.push_id(code),
            (Global::Dtype, [code, ..]) if arguments.len() <= 3 => {
                let node = match self.element(*code) {
                    Err(e) if self.dialect == Dialect::Torch && e.kind == Kind::Unsupported => {
                        self.refused(&e.detail, None)?
                    }
                    element => Node::Element(element?),
                };
                self.push_node(node)
            }
            (Global::Encode, &[text, encoding]) => {
                if self.text(encoding) != Some(b"latin1") {
                    return Err(self.error(Kind::UnsafePickle, "expected the encoding 'latin1', found another"));
                }
                self.encode_latin1(text)
            }
            (Global::Scalar, &[element, bytes]) => self.scalar(element, bytes),
            (Global::EmptyBytes, []) => self.push_node(Node::Bytes(Blob::new(false, 0..0))),
            (Global::NdArray | Global::EmptyBytes | Global::DefaultDict | Global::Factory | Global::Element(_), _) => {
                Err(self.error(
                    Kind::UnsafePickle,
                    "calls numpy.ndarray, a class of plain values or defaultdict in a way that data never do",
                ))
            }
            _ => Err(self.malformed(format!("calls {function:?} with {} arguments", arguments.len()))),
        }
    }

    /// An array without elements, which a BUILD fills.
    fn reconstruct(&mut self, class: Id, shape: Id, code: Id) -> Result<()> {
        let is_ndarray = matches!(self.cells.get(class as usize), Some(Operand::Global(Global::NdArray)));
        let shape_ok = matches!(self.node(shape), Some(Node::Tuple(dims)) if dims.len() == 1)
            && self.dims(shape)?.iter().all(|n| *n == 0);
        let code_ok = match self.node(code) {
            Some(Node::Bytes(blob) | Node::Str(blob)) => self.blob(blob) == b"b",
            _ => false,
        };
        if !is_ndarray {
            return Err(self.error(Kind::UnsafePickle, "expected numpy.ndarray to reconstruct, found another class"));
        }
        if !shape_ok || !code_ok {
            return Err(self.malformed("expected _reconstruct(ndarray, (0,), b'b')"));
        }
        self.push(Operand::Shell)
    }

    /// Whether a value may be the factory of a defaultdict, which is not called.
    fn is_factory(&self, id: Id) -> bool {
        match self.cells.get(id as usize) {
            Some(Operand::Global(name)) => {
                matches!(
                    name,
                    Global::Factory | Global::EmptyBytes | Global::Dict | Global::DefaultDict | Global::Torch(_)
                )
            }
            Some(Operand::Value(node)) => matches!(node, Node::None | Node::Refused(_)),
            _ => false,
        }
    }

    /// The value of `scalar(dtype, bytes)`.
    fn scalar(&mut self, element: Id, bytes: Id) -> Result<()> {
        if matches!(self.node(element), Some(Node::Refused(_))) {
            return self.push_id(element);
        }
        let (Some(Node::Element(element)), Some(Node::Bytes(blob))) = (self.node(element), self.node(bytes)) else {
            return Err(self.malformed("expected scalar(dtype, bytes)"));
        };
        let (element, blob) = (*element, *blob);
        if element.dtype.size().map(|n| n as u64) != Some(blob.len()) {
            return Err(
                self.malformed(format!("expected a numpy scalar of its dtype's size, found {} bytes", blob.len()))
            );
        }
        self.push_node(Node::Scalar(element, blob))
    }

    pub(super) fn build(&mut self, target: Id, state: Id) -> Result<()> {
        if self.dialect == Dialect::Torch && self.torch_ignores_state(target) {
            return Ok(());
        }
        let Some(Node::Tuple(state)) = self.node(state) else {
            return Err(
                self.error(Kind::UnsafePickle, "expected a tuple as the state of an object, found another type")
            );
        };
        let state = state.clone();
        let made = match (self.cells.get(target as usize), &state[..]) {
            (Some(Operand::Shell), &[version, shape, element, fortran, data]) => {
                let fortran = match self.node(fortran) {
                    Some(Node::Bool(fortran)) => *fortran,
                    Some(Node::Int(n)) if *n == 0 || *n == 1 => *n == 1,
                    _ => return Err(self.malformed("expected a bool for the order of an array")),
                };
                if !matches!(self.node(version), Some(Node::Int(_))) {
                    return Err(self.malformed("expected a version number in the state of an array"));
                }
                self.array(shape, element, fortran, data, false)?
            }
            (Some(Operand::Value(Node::Element(element))), &[version, order, subtype, names, fields, ..])
                if (8..=9).contains(&state.len()) =>
            {
                let element = *element;
                let plain = [subtype, names, fields].iter().all(|id| matches!(self.node(*id), Some(Node::None)));
                if !plain && self.dialect == Dialect::Torch {
                    self.cells[target as usize] = Operand::Value(self.refused("a structured dtype", None)?);
                    return Ok(());
                }
                if !plain || !matches!(self.node(version), Some(Node::Int(_))) {
                    return Err(self.error(Kind::Unsupported, "structured dtypes are unsupported"));
                }
                let swapped = match self.text(order) {
                    Some(b"<" | b"=" | b"|") => false,
                    Some(b">") => element.dtype.bits() > 8,
                    _ => {
                        return Err(
                            self.malformed("expected a dtype of byte order '<', '>', '=' or '|', found another")
                        );
                    }
                };
                Node::Element(Element { dtype: element.dtype, swapped })
            }
            _ => {
                return Err(self
                    .error(Kind::UnsafePickle, "expected a numpy array or dtype to set the state of, found another"));
            }
        };
        // Replace in place: the memo may already refer to the object.
        self.cells[target as usize] = Operand::Value(made);
        Ok(())
    }

    fn element(&self, code: Id) -> Result<Element> {
        if let Some(Operand::Global(Global::Element(dtype))) = self.cells.get(code as usize) {
            return Ok(Element { dtype: *dtype, swapped: false });
        }
        let text = self.text(code).ok_or_else(|| self.malformed("expected a string as a dtype"))?;
        let shown = || String::from_utf8_lossy(&text[..text.len().min(40)]).into_owned();
        match std::str::from_utf8(text).map(Spelling::of_code) {
            Ok((Spelling::Type(dtype), swapped)) => Ok(Element { dtype, swapped }),
            Ok((Spelling::Unsupported(what), _)) => {
                Err(self.error(Kind::Unsupported, format!("elements of type '{}' ({what}) are unsupported", shown())))
            }
            _ => Err(self.error(Kind::Unsupported, format!("elements of type '{}' are unsupported", shown()))),
        }
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
                        scalar_integer(*element, self.blob(blob)).and_then(|n| u64::try_from(n).ok())
                    }
                    _ => None,
                };
                n.ok_or_else(|| self.malformed("expected a shape of non-negative integers"))
            })
            .collect()
    }

    fn count(&self, id: Id) -> usize {
        match self.node(id) {
            Some(Node::Tuple(items) | Node::List(items)) => items.len(),
            _ => 0,
        }
    }

    fn array(&mut self, shape: Id, element: Id, fortran: bool, data: Id, over_buffer: bool) -> Result<Node> {
        let shape = self.dims(shape)?;
        if let Some(Node::Refused(name)) = self.node(element) {
            return Ok(Node::Refused(*name));
        }
        let Some(Node::Element(element)) = self.node(element) else {
            return Err(self.malformed("expected a dtype for an array, found another type"));
        };
        let element = *element;
        let Some(Node::Bytes(data) | Node::ByteArray(data)) = self.node(data) else {
            return Err(self.malformed("expected bytes as the contents of an array, found another type"));
        };
        let data = *data;
        let size = element.dtype.size().unwrap_or(0) as u64;
        let needed = shape.iter().try_fold(size, |n, d| n.checked_mul(*d));
        if needed != Some(data.len()) {
            return Err(self.malformed(format!(
                "expected data for shape {shape:?} of {size}-byte elements, found {} bytes",
                data.len()
            )));
        }
        self.spend(size_of::<NumpyArray>() + shape.len() * 8)?;
        Ok(Node::Array(Box::new(NumpyArray { element, shape, fortran, over_buffer, data })))
    }
}
