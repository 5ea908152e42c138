//! Writing a field of a token cache.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, ThreadId};
use std::time::Duration;

use actshard_core::threads::{Lock, Signal};
use actshard_core::tokens::write::{FieldWriter, Storage, WriteOptions, plain_size};
use actshard_core::{Error, Kind};
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;

use super::{TokenField, argument};
use crate::arguments::dtype_of;
use crate::detach;

/// The CRC-32 of each data file by its path in the folder.
type Checksums = Vec<(String, u32)>;

/// Bytes of the frames and of the indexes of an array of stored numbers, its number of files, and of elements that the last
/// frame has room for.
#[pyfunction]
pub fn token_array_size(py: Python<'_>, elements: u64, item: usize, offsets: bool) -> PyResult<(u64, u64, u64, u64)> {
    detach::guarded(py, || {
        let size = detach::detached(py, |_| plain_size(elements, item, offsets))?;
        Ok((size.frames, size.indexes, size.files, size.unused))
    })
}

/// A field being written.
#[pyclass(frozen, module = "actshard._native")]
pub struct TokenFieldWriter {
    state: Lock<Writing>,
    idle: Signal,
}

/// The owner of the writer. Calls take the writer out, so that no lock is locked while Python code (a signal handler)
/// runs.
enum Writing {
    Idle(Box<FieldWriter>),
    Busy(ThreadId),
    Done,
}

/// Returns the writer when a call ends, also after a panic.
struct Given<'a> {
    owner: &'a TokenFieldWriter,
    writer: Option<Box<FieldWriter>>,
}

impl Drop for Given<'_> {
    fn drop(&mut self) {
        let mut state = self.owner.state.lock();
        *state = self.writer.take().map_or(Writing::Done, Writing::Idle);
        self.owner.idle.notify_all();
    }
}

impl TokenFieldWriter {
    /// Takes the writer, after other threads' calls. A call from within a call (by a signal handler) is an error, because it
    /// would wait for itself.
    fn take(&self, watch: actshard_core::threads::Watch<'_>) -> actshard_core::Result<Given<'_>> {
        const LOOK: Duration = Duration::from_millis(20);
        loop {
            let mut state = self.state.lock();
            match &*state {
                Writing::Busy(thread) if *thread == thread::current().id() => {
                    let detail = "this call interrupted another call that is writing the same field";
                    return Err(Error::new(Kind::Argument, detail));
                }
                Writing::Busy(_) => {
                    drop(self.idle.wait_timeout(state, LOOK).0);
                    if watch() {
                        return Err(Error::new(Kind::Interrupted, "interrupted"));
                    }
                }
                Writing::Done => {
                    return Err(Error::new(Kind::Argument, "this field is already finished, or finishing it failed"));
                }
                Writing::Idle(_) => {
                    let taken = std::mem::replace(&mut *state, Writing::Busy(thread::current().id()));
                    if let Writing::Idle(writer) = taken {
                        return Ok(Given { owner: self, writer: Some(writer) });
                    }
                }
            }
        }
    }

    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut FieldWriter, actshard_core::threads::Watch<'_>) -> actshard_core::Result<T> + Send,
    ) -> PyResult<T> {
        detach::detached(py, |watch| {
            let mut given = self.take(watch)?;
            match given.writer.as_mut() {
                Some(writer) => work(writer, watch),
                None => Err(Error::new(Kind::Internal, "no writer")),
            }
        })
    }
}

#[pymethods]
impl TokenFieldWriter {
    #[new]
    fn new(
        py: Python<'_>,
        folder: PathBuf,
        dtype: &str,
        axes: u64,
        storage: &str,
        direct: bool,
    ) -> PyResult<TokenFieldWriter> {
        detach::guarded(py, || {
            let dtype = dtype_of(py, dtype)?;
            let storage = Storage::from_name(storage)
                .ok_or_else(|| argument(py, format!("storage: expected 'plain' or 'lz4', found '{storage}'")))?;
            let writer = detach::detached(py, |_| {
                FieldWriter::create(&folder, dtype, axes, WriteOptions::new(storage, direct))
            })?;
            Ok(TokenFieldWriter { state: Lock::new(Writing::Idle(Box::new(writer))), idle: Signal::new() })
        })
    }

    /// Appends rows: the bytes of their elements, their lengths in elements, and the sizes of all axes but the last.
    fn append(
        &self,
        py: Python<'_>,
        elements: PyReadonlyArray1<'_, u8>,
        lengths: PyReadonlyArray1<'_, i64>,
        shapes: PyReadonlyArray1<'_, i64>,
    ) -> PyResult<()> {
        detach::guarded(py, || {
            let (elements, lengths, shapes) = (elements.as_slice()?, lengths.as_slice()?, shapes.as_slice()?);
            self.with(py, |writer, _| writer.append(elements, lengths, shapes))
        })
    }

    /// Appends all rows of another field.
    fn extend(&self, py: Python<'_>, field: PyRef<'_, TokenField>) -> PyResult<()> {
        detach::guarded(py, || {
            let field = Arc::clone(&field.field);
            self.with(py, |writer, watch| writer.extend(&field, watch))
        })
    }

    /// Numbers of rows and elements so far.
    fn counts(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        detach::guarded(py, || self.with(py, |writer, _| Ok(writer.counts())))
    }

    /// Writes the rest; returns the numbers of rows and elements, and the CRC-32 of each data file by its path in the folder.
    fn finish(&self, py: Python<'_>) -> PyResult<(u64, u64, Checksums)> {
        detach::guarded(py, || {
            detach::detached(py, |watch| {
                let writer = self.take(watch)?.writer.take();
                let written = writer.ok_or_else(|| Error::new(Kind::Internal, "no writer"))?.finish()?;
                Ok((written.rows, written.elements, written.checksums))
            })
        })
    }
}
