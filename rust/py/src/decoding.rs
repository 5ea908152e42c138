//! Decoders of chunks that are Python functions.

use actshard_core::arrays::coded::{self, Decode};
use actshard_core::location::Location;
use actshard_core::{Error, Kind};
use pyo3::exceptions::{PyException, PyMemoryError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::errors;

/// Chunks decoded by Python.
#[derive(Debug)]
pub struct Callback(pub Py<PyAny>);

impl Decode for Callback {
    fn chunk(&self, indices: &[u64], len: u64, location: &Location) -> actshard_core::Result<Option<Vec<u8>>> {
        let made = Python::attach(|py| -> PyResult<Option<PyBackedBytes>> {
            Ok(self.0.bind(py).call1((indices.to_vec(),))?.extract()?)
        });
        match made {
            Ok(bytes) => bytes.map(|bytes| coded::of_length(bytes.to_vec(), len, location)).transpose(),
            Err(raised) => Err(Python::attach(|py| {
                // An interrupt or a lack of memory is not a fault of the file; an actshard error names the file already.
                let ours = || py.import("actshard.base.errors")?.getattr("ActshardError");
                let through = !raised.is_instance_of::<PyException>(py)
                    || raised.is_instance_of::<PyMemoryError>(py)
                    || ours().is_ok_and(|class| raised.is_instance(py, &class));
                if through {
                    return errors::carry(raised);
                }
                Error::new(Kind::Format, format!("the zarr package cannot decode this chunk: {raised}")).at(location)
            })),
        }
    }
}
