//! Memory shared with numpy: the only `unsafe` of this crate.
//!
//! It creates arrays for a gather to fill, passes the bytes of a writable array to a gather, and creates read-only arrays over
//! mapped bytes, with an owner that keeps the mapping alive.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::ptr;

use actshard_core::files::open::View;
use actshard_core::memory::claims::{Claimed, Claims};
use actshard_core::memory::output::Output;
use actshard_core::threads::Lock;
use actshard_core::{Error, Kind};
use numpy::npyffi::{
    self, NPY_ARRAY_ALIGNED, NPY_ARRAY_C_CONTIGUOUS, NPY_ARRAY_WRITEABLE, NpyTypes, PY_ARRAY_API, PyArray_Descr,
    PyArrayObject, npy_intp,
};
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;

use crate::errors;

/// Keeps mapped bytes alive for the arrays that view them.
#[pyclass(frozen, module = "actshard._native")]
pub struct MappedRows {
    view: View,
}

/// numpy allocates smaller outputs itself.
const OURS_FROM: usize = 1 << 20;

/// Memory of an output; the array's base keeps it alive.
#[pyclass(frozen, module = "actshard._native")]
pub struct OutputMemory {
    // Never read: arrays point into it.
    _memory: Lock<Output>,
}

/// A new uninitialised C-contiguous array.
pub fn empty<'py>(
    py: Python<'py>,
    descr: &Bound<'py, PyArrayDescr>,
    dims: &[usize],
) -> PyResult<Bound<'py, PyUntypedArray>> {
    let size = dims.iter().try_fold(descr.itemsize(), |n, d| n.checked_mul(*d)).unwrap_or(0);
    if size >= OURS_FROM {
        let memory = Output::new(size).map_err(|_| {
            let detail = format!("cannot allocate {size} bytes for an array of shape {dims:?}; read less at once");
            errors::raise(py, &Error::new(Kind::NoMemory, detail))
        })?;
        return over_output(py, memory, descr, dims);
    }
    // SAFETY: no data pointer is given, so numpy allocates.
    unsafe { from_descr(py, descr, dims, ptr::null_mut(), 0) }
}

/// A C-contiguous array that owns an output, which has at least `dims` x the element size bytes.
pub fn over_output<'py>(
    py: Python<'py>,
    mut memory: Output,
    descr: &Bound<'py, PyArrayDescr>,
    dims: &[usize],
) -> PyResult<Bound<'py, PyUntypedArray>> {
    let size = dims.iter().try_fold(descr.itemsize(), |n, d| n.checked_mul(*d));
    let bytes = memory.as_mut();
    if size.is_none_or(|n| n > bytes.len()) {
        return Err(PyMemoryError::new_err("an array larger than its memory"));
    }
    let data = bytes.as_mut_ptr();
    let owner = Bound::new(py, OutputMemory { _memory: Lock::new(memory) })?;
    let flags = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | NPY_ARRAY_WRITEABLE;
    // SAFETY: `data` points to at least `dims` x itemsize bytes (compared above) without other references, writable and
    // aligned for any element. Moving an Output does not move its bytes. They live as long as `owner`, which becomes the
    // array's base below.
    let array = unsafe { from_descr(py, descr, dims, data.cast(), flags)? };
    // SAFETY: as in `over_map`.
    let failed = unsafe { PY_ARRAY_API.PyArray_SetBaseObject(py, array.as_array_ptr(), owner.into_ptr()) } != 0;
    if failed { Err(PyErr::fetch(py)) } else { Ok(array) }
}

/// The memory that calls of this crate are writing to.
static WRITING: Claims = Claims::new();

/// The bytes of a caller's array, for exclusive writing: no other call writes to them until this is dropped. Keeps the array
/// alive.
pub struct Claim {
    data: *mut u8,
    len: usize,
    _claimed: Claimed,
    _array: Py<PyUntypedArray>,
}

// SAFETY: the pointer is to the data of an array that `_array` keeps alive on any thread, and a Claim cannot be copied.
unsafe impl Send for Claim {}

impl Claim {
    /// Claims all bytes of an array. Raises ArgumentError unless it [`is_plain_and_writable`] and no other thread has claimed
    /// some of its bytes.
    pub fn new(array: &Bound<'_, PyUntypedArray>, what: &str) -> PyResult<Claim> {
        let refuse = |detail: String| errors::raise(array.py(), &Error::new(Kind::Argument, detail));
        if !is_plain_and_writable(array) {
            return Err(refuse(format!("{what}: expected a writable C-contiguous array")));
        }
        let len = array.len() * array.dtype().itemsize();
        // SAFETY: the pointer is to the live array object that `array` refers to.
        let data = unsafe { (*array.as_array_ptr()).fields.data }.cast::<u8>();
        let claimed = WRITING
            .claim(data.addr(), len)
            .ok_or_else(|| refuse(format!("{what}: another read is writing to this memory; give each its own")))?;
        Ok(Claim { data, len, _claimed: claimed, _array: array.clone().unbind() })
    }

    /// Whether this memory and `other` overlap.
    pub fn overlaps<T>(&self, other: &[T]) -> bool {
        let other = other.as_ptr_range();
        other.start.addr() < self.data.addr() + self.len && self.data.addr() < other.end.addr()
    }
}

impl AsMut<[u8]> for Claim {
    fn as_mut(&mut self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: `data` points to `len` bytes of an array that is writable and C-contiguous (checked in `new`) and that
        // `_array` keeps alive; numpy does not resize an array with two references. No other slice of this crate covers the
        // bytes (WRITING). The compiler must treat numpy's memory as initialised even if it was never written, because a
        // foreign function returned it. As everywhere in numpy, the caller must not write to it meanwhile; a race gives mixed
        // numbers.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.len) }
    }
}

/// The bytes of an array, lent to a thread that fills them.
pub struct Lent {
    claim: Claim,
    /// Index among the lent arrays.
    pub number: usize,
}

impl AsMut<[u8]> for Lent {
    fn as_mut(&mut self) -> &mut [u8] {
        self.claim.as_mut()
    }
}

/// Lends an array's bytes to a thread.
pub fn lend(array: &Bound<'_, PyUntypedArray>, number: usize) -> PyResult<Lent> {
    Ok(Lent { claim: Claim::new(array, "buffers")?, number })
}

/// A read-only C-contiguous array over mapped bytes; their number is `dims` x the element size.
pub fn over_map<'py>(
    py: Python<'py>,
    view: View,
    descr: &Bound<'py, PyArrayDescr>,
    dims: &[usize],
) -> PyResult<Bound<'py, PyUntypedArray>> {
    let size = dims.iter().try_fold(descr.itemsize(), |n, d| n.checked_mul(*d));
    if size != Some(view.bytes().len()) || view.bytes().is_empty() {
        return empty(py, descr, &[0, dims.last().copied().unwrap_or(0)]);
    }
    let owner = Bound::new(py, MappedRows { view })?;
    let data = owner.get().view.bytes().as_ptr();
    let aligned = (data as usize).is_multiple_of(descr.alignment().max(1));
    let flags = if aligned { NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED } else { NPY_ARRAY_C_CONTIGUOUS };
    // SAFETY: `data` points to exactly dims x itemsize bytes (compared above). The flags exclude WRITEABLE, so numpy never
    // writes through the pointer. The bytes live as long as `owner`, which becomes the array's base below.
    let array = unsafe { from_descr(py, descr, dims, data.cast_mut().cast(), flags)? };
    // SAFETY: `array` is a live array without a base; SetBaseObject takes the reference that into_ptr releases.
    let failed = unsafe { PY_ARRAY_API.PyArray_SetBaseObject(py, array.as_array_ptr(), owner.into_ptr()) } != 0;
    if failed { Err(PyErr::fetch(py)) } else { Ok(array) }
}

/// # Safety
/// `data` is null, or points to the bytes that dims and dtype need, alive until a base object is set.
unsafe fn from_descr<'py>(
    py: Python<'py>,
    descr: &Bound<'py, PyArrayDescr>,
    dims: &[usize],
    data: *mut c_void,
    flags: c_int,
) -> PyResult<Bound<'py, PyUntypedArray>> {
    let mut shape = [0 as npy_intp; 32];
    if dims.len() > shape.len() {
        return Err(pyo3::exceptions::PyValueError::new_err("more than 32 dimensions"));
    }
    for (to, from) in shape.iter_mut().zip(dims) {
        *to = npy_intp::try_from(*from)?;
    }
    // SAFETY: the type object and the descriptor are live; NewFromDescr takes one reference to the descriptor, which
    // into_dtype_ptr releases. `shape` has dims.len() sizes; strides are null, hence C order. The caller guarantees `data`.
    let array = unsafe {
        PY_ARRAY_API.PyArray_NewFromDescr(
            py,
            npyffi::get_type_object(py, NpyTypes::PyArray_Type),
            descr.clone().into_dtype_ptr().cast::<PyArray_Descr>(),
            dims.len() as c_int,
            shape.as_mut_ptr(),
            ptr::null_mut(),
            data,
            flags,
            ptr::null_mut(),
        )
    };
    // SAFETY: NewFromDescr returns a new reference to an array, or null with an exception set.
    let array = unsafe { Bound::from_owned_ptr_or_err(py, array)? };
    Ok(array.cast_into::<PyUntypedArray>()?)
}

/// Whether an array is writable and one contiguous block of bytes.
pub fn is_plain_and_writable(array: &Bound<'_, PyUntypedArray>) -> bool {
    // SAFETY: the pointer is to the live array object that `array` refers to.
    let flags = unsafe { (*array.as_array_ptr()).fields.flags };
    flags & NPY_ARRAY_WRITEABLE != 0 && flags & NPY_ARRAY_C_CONTIGUOUS != 0
}

/// The bytes of a new array without other references; `None` for any other array. For a caller's array use [`Claim`].
pub fn bytes_mut<'a>(array: &'a mut Bound<'_, PyUntypedArray>) -> Option<&'a mut [u8]> {
    // SAFETY: the pointer is to the live object that `array` refers to, and the GIL is held.
    let references = unsafe { pyo3::ffi::Py_REFCNT(array.as_ptr()) };
    if references != 1 || !is_plain_and_writable(array) {
        return None;
    }
    let len = array.len() * array.dtype().itemsize();
    if len == 0 {
        return Some(&mut []);
    }
    let raw: *mut PyArrayObject = array.as_array_ptr();
    // SAFETY: the array is live for 'a, writable and C-contiguous (checked above), so `data` points to len bytes. The only
    // reference to it is borrowed for 'a, so no other code reaches them. For memory never written, see `Claim`.
    Some(unsafe { std::slice::from_raw_parts_mut((*raw).fields.data.cast::<u8>(), len) })
}
