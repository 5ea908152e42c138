//! Levanter's shuffles, and the random numbers of JAX that they are made of.

use actshard_core::tokens::order::{self, Key};
use actshard_core::{Error, Kind};
use numpy::{PyArray1, PyArrayDescr, PyReadonlyArray1, PyUntypedArray};
use pyo3::prelude::*;

use super::{argument, cast_mut, empty, room};
use crate::{buffer, detach};

/// One of Levanter's shuffles.
#[pyclass(frozen, module = "actshard._native")]
pub struct TokenOrder {
    order: order::ExampleOrder,
}

#[pymethods]
impl TokenOrder {
    /// `kind`: "simple", "block" with (io, window), "era" with (era,).
    #[new]
    fn new(py: Python<'_>, kind: &str, how: &str, length: u64, key: Key, sizes: Vec<u64>) -> PyResult<TokenOrder> {
        detach::guarded(py, || {
            let how = match how {
                "feistel" => order::PermutationKind::Feistel,
                "linear" => order::PermutationKind::Linear,
                "linear-float64" => order::PermutationKind::LinearFloat64,
                _ => return Err(argument(py, format!("expected the permutation feistel or linear, found {how:?}"))),
            };
            let order = detach::detached(py, |_| match (kind, &sizes[..]) {
                ("simple", []) => order::ExampleOrder::simple(how, length, key),
                ("block", [io, window]) => order::ExampleOrder::block(how, length, *io, *window, key),
                ("era", [era]) => order::ExampleOrder::era(how, length, *era, key),
                _ => {
                    Err(Error::new(Kind::Argument, format!("expected the order simple, block or era, found {kind:?}")))
                }
            })?;
            Ok(TokenOrder { order })
        })
    }

    fn map<'py>(&self, py: Python<'py>, numbers: PyReadonlyArray1<'py, i64>) -> PyResult<Bound<'py, PyUntypedArray>> {
        detach::guarded(py, || {
            let numbers = numbers.as_slice()?;
            let mut out = empty(py, &PyArrayDescr::new(py, "int64")?, &[numbers.len()])?;
            if let Some(bytes) = buffer::bytes_mut(&mut out) {
                let out = cast_mut(py, bytes)?;
                detach::detached(py, |watch| self.order.map(numbers, out, watch))?;
            }
            Ok(out)
        })
    }

    fn parameters(&self) -> Vec<u64> {
        self.order.parameters()
    }
}

/// `jax.random.PRNGKey`.
#[pyfunction]
pub fn jax_key(seed: u64) -> (u32, u32) {
    order::key(seed).into()
}

/// `jax.random.split`.
#[pyfunction]
pub fn jax_split(py: Python<'_>, key: Key, n: u32) -> PyResult<Vec<(u32, u32)>> {
    detach::guarded(py, || {
        detach::detached(py, |_| {
            let mut keys = room(usize::try_from(n).ok(), "keys")?;
            keys.extend((0..n).map(|i| <(u32, u32)>::from(order::split(key, i))));
            Ok(keys)
        })
    })
}

/// `jax.random.fold_in`.
#[pyfunction]
pub fn jax_fold_in(key: Key, data: u32) -> (u32, u32) {
    order::fold_in(key, data).into()
}

/// `jax.random.randint(key, (), 0, 2**30)`.
#[pyfunction]
pub fn jax_randint30(key: Key) -> u64 {
    order::seed_of(key)
}

/// `jax.random.permutation(key, numpy.arange(n))`.
#[pyfunction]
pub fn jax_permutation(py: Python<'_>, key: Key, n: u32) -> PyResult<Bound<'_, PyArray1<u32>>> {
    detach::guarded(py, || {
        let ids = detach::detached(py, |_| {
            let mut ids = room(usize::try_from(n).ok(), "a permutation")?;
            ids.extend(0..n);
            order::shuffle(key, &mut ids);
            Ok(ids)
        })?;
        Ok(PyArray1::from_vec(py, ids))
    })
}
