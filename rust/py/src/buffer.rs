//! Memory shared with numpy: the only `unsafe` of this crate.
//!
//! Three things happen here: an array is made for a gather to fill; the bytes of a writable array are handed to a
//! gather; and a read-only array is laid over mapped bytes, with an owner that keeps the map alive.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Mutex;

use actshard_core::bytes::View;
use memmap2::MmapMut;
use numpy::npyffi::{
    self, NPY_ARRAY_ALIGNED, NPY_ARRAY_C_CONTIGUOUS, NPY_ARRAY_WRITEABLE, NpyTypes, PY_ARRAY_API, PyArray_Descr,
    PyArrayObject, npy_intp,
};
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;

/// Keeps mapped bytes alive for the arrays that look at them.
#[pyclass(frozen, module = "actshard._native")]
pub struct MappedRows {
    view: View,
}

/// Outputs from this size on are recycled; below it the allocator reuses memory by itself.
const RECYCLE_FROM: usize = 1 << 20;
/// What is kept of freed outputs, at most, together.
const KEEP_AT_MOST: usize = 256 << 20;
/// And how many blocks: a loop that binds the next batch before it drops the last needs two, and several threads may loop.
const KEEP_BLOCKS: usize = 8;
/// Blocks come in multiples of a huge page.
const GRAIN: usize = 2 << 20;

/// Large outputs that were freed last, the latest at the end. Fresh memory costs more than filling it (the kernel clears
/// every page, and a virtual machine may have to ask its host for it): a loop that drops each batch gets the same pages
/// back. Only ever tried, never waited for, so that a fork at a bad moment costs an allocation and nothing else.
static FREED: Mutex<Vec<MmapMut>> = Mutex::new(vec![]);

/// Memory of a large output, which the array keeps alive as its base.
#[pyclass(frozen, module = "actshard._native")]
pub struct OutputMemory {
    map: Option<MmapMut>,
}

impl Drop for OutputMemory {
    fn drop(&mut self) {
        if let (Some(map), Ok(mut freed)) = (self.map.take(), FREED.try_lock())
            && map.len() <= KEEP_AT_MOST
        {
            freed.push(map);
            while freed.len() > KEEP_BLOCKS || freed.iter().map(|m| m.len()).sum::<usize>() > KEEP_AT_MOST {
                freed.remove(0);
            }
        }
    }
}

/// A block of at least `size` bytes: the one freed last that fits without much waste, or a new one. If none fits, the oldest
/// is given back first, so that a program that changes its sizes does not keep memory it has no use for.
fn output_memory(size: usize) -> std::io::Result<MmapMut> {
    if let Ok(mut freed) = FREED.try_lock() {
        let most = size.saturating_mul(2).max(4 * GRAIN);
        if let Some(at) = freed.iter().rposition(|map| (size..=most).contains(&map.len())) {
            return Ok(freed.remove(at));
        }
        if !freed.is_empty() {
            freed.remove(0);
        }
    }
    // Up to an eighth more, so that outputs of about the same size fit each other's; what is not touched costs nothing.
    let grain = (size.checked_next_power_of_two().unwrap_or(GRAIN) / 16).max(GRAIN);
    let map = MmapMut::map_anon(size.checked_next_multiple_of(grain).unwrap_or(size))?;
    // Fewer, larger pages to clear; a system that refuses clears small ones.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    Ok(map)
}

/// A new C-contiguous array, not initialised.
pub fn empty<'py>(
    py: Python<'py>,
    descr: &Bound<'py, PyArrayDescr>,
    dims: &[usize],
) -> PyResult<Bound<'py, PyUntypedArray>> {
    let size = dims.iter().try_fold(descr.itemsize(), |n, d| n.checked_mul(*d)).unwrap_or(0);
    if size >= RECYCLE_FROM {
        let mut map = output_memory(size).map_err(|_| {
            PyMemoryError::new_err(format!("unable to allocate {size} bytes for an output of shape {dims:?}"))
        })?;
        let data = map.as_mut_ptr();
        let owner = Bound::new(py, OutputMemory { map: Some(map) })?;
        let flags = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | NPY_ARRAY_WRITEABLE;
        // SAFETY: `data` points to at least `size` bytes of a private anonymous mapping that nobody else refers to,
        // page-aligned and writable. They live as long as `owner`, which becomes the array's base below.
        let array = unsafe { from_descr(py, descr, dims, data.cast(), flags)? };
        // SAFETY: as in `over_map`.
        let failed = unsafe { PY_ARRAY_API.PyArray_SetBaseObject(py, array.as_array_ptr(), owner.into_ptr()) } != 0;
        return if failed { Err(PyErr::fetch(py)) } else { Ok(array) };
    }
    // SAFETY: no data pointer is given, so numpy allocates.
    unsafe { from_descr(py, descr, dims, ptr::null_mut(), 0) }
}

/// A read-only C-contiguous array over mapped bytes; `dims` x the element size is their number.
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
    // SAFETY: `data` points to exactly dims x itemsize bytes (compared above). The flags leave out WRITEABLE, so numpy
    // never writes through the pointer. The bytes live as long as `owner`, which becomes the array's base below.
    let array = unsafe { from_descr(py, descr, dims, data.cast_mut().cast(), flags)? };
    // SAFETY: `array` is a live array without a base; SetBaseObject takes over the reference that into_ptr gives up.
    let failed = unsafe { PY_ARRAY_API.PyArray_SetBaseObject(py, array.as_array_ptr(), owner.into_ptr()) } != 0;
    if failed { Err(PyErr::fetch(py)) } else { Ok(array) }
}

/// # Safety
/// `data` is null, or points to as many bytes as dims and dtype need, alive until a base object is set.
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
    // SAFETY: the type object and the descriptor are live; NewFromDescr takes over one reference to the descriptor,
    // which into_dtype_ptr gives up. `shape` holds dims.len() sizes; strides are null, hence C order. The caller
    // answers for `data`.
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

/// Whether an array can be written as one block of bytes.
pub fn is_plain_and_writable(array: &Bound<'_, PyUntypedArray>) -> bool {
    // SAFETY: the pointer is to the live array object that `array` refers to.
    let flags = unsafe { (*array.as_array_ptr()).fields.flags };
    flags & NPY_ARRAY_WRITEABLE != 0 && flags & NPY_ARRAY_C_CONTIGUOUS != 0
}

/// The bytes of an array that [`is_plain_and_writable`]; `None` otherwise.
///
/// The borrow is the caller's promise to numpy's users that nobody else writes there meanwhile; numpy has no way to
/// enforce it, and a race gives mixed numbers.
pub fn bytes_mut<'a>(array: &'a mut Bound<'_, PyUntypedArray>) -> Option<&'a mut [u8]> {
    if !is_plain_and_writable(array) {
        return None;
    }
    let len = array.len() * array.dtype().itemsize();
    if len == 0 {
        return Some(&mut []);
    }
    let raw: *mut PyArrayObject = array.as_array_ptr();
    // SAFETY: the array is live for 'a, writable and C-contiguous (checked above), so `data` points to len bytes.
    Some(unsafe { std::slice::from_raw_parts_mut((*raw).fields.data.cast::<u8>(), len) })
}
