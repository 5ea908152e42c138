//! Bindings to libdeflate.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr::NonNull;

use libdeflate_sys as sys;

use crate::error::{Error, Kind, Result};

/// The result of inflating a member or a stretch.
pub enum Outcome {
    Done { read: usize, made: usize },
    Full,
    Bad,
}

impl Outcome {
    /// From libdeflate's return value and counts.
    fn of(result: sys::libdeflate_result, read: usize, made: usize) -> Outcome {
        match result {
            sys::libdeflate_result_LIBDEFLATE_SUCCESS if read > 0 => Outcome::Done { read, made },
            sys::libdeflate_result_LIBDEFLATE_INSUFFICIENT_SPACE => Outcome::Full,
            _ => Outcome::Bad,
        }
    }
}

/// libdeflate's decompressor.
pub struct Inflater(NonNull<sys::libdeflate_decompressor>);

impl Inflater {
    pub fn new() -> Result<Inflater> {
        // SAFETY: no preconditions; returns null when out of memory.
        let made = unsafe { sys::libdeflate_alloc_decompressor() };
        NonNull::new(made).map(Inflater).ok_or_else(|| Error::new(Kind::NoMemory, "cannot allocate a decompressor"))
    }

    /// Inflates one gzip member and checks its checksum and length.
    pub fn member(&mut self, gz: &[u8], out: &mut [u8]) -> Outcome {
        let (mut read, mut made) = (0usize, 0usize);
        // SAFETY: the decompressor is live; the pointers come from slices of the lengths passed, the output slice borrowed
        // exclusively; the counts are written through pointers to live locals.
        let result = unsafe {
            sys::libdeflate_gzip_decompress_ex(
                self.0.as_ptr(),
                gz.as_ptr().cast::<c_void>(),
                gz.len(),
                out.as_mut_ptr().cast::<c_void>(),
                out.len(),
                &raw mut read,
                &raw mut made,
            )
        };
        Outcome::of(result, read, made)
    }

    /// Inflates deflate data without a gzip header.
    pub fn raw(&mut self, data: &[u8], out: &mut [u8]) -> Outcome {
        let (mut read, mut made) = (0usize, 0usize);
        // SAFETY: as in `member`.
        let result = unsafe {
            sys::libdeflate_deflate_decompress_ex(
                self.0.as_ptr(),
                data.as_ptr().cast::<c_void>(),
                data.len(),
                out.as_mut_ptr().cast::<c_void>(),
                out.len(),
                &raw mut read,
                &raw mut made,
            )
        };
        Outcome::of(result, read, made)
    }
}

impl Drop for Inflater {
    fn drop(&mut self) {
        // SAFETY: made by libdeflate_alloc_decompressor and freed once.
        unsafe { sys::libdeflate_free_decompressor(self.0.as_ptr()) }
    }
}
