//! `Descriptors`: flat columns for a transport.

use std::mem::MaybeUninit;
use std::slice;

use kvferry_core::moves::columns::{Columns, Expansion};
use kvferry_core::moves::schedule::Schedule;
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

use crate::errors::OrRaise;

/// The moves of one rank pair as flat columns, sorted by target and coalesced.
///
/// Row ``i`` moves ``length[i]`` bytes from ``source_offset[i]`` of tensor ``source_tensor[i]`` to
/// ``target_offset[i]`` of tensor ``target_tensor[i]``. Tensors are slot indices, offsets count bytes
/// from that tensor's first. All columns are int64 arrays of shape ``[len(self)]``.
#[pyclass(frozen, module = "kvferry._core")]
pub struct Descriptors {
    #[pyo3(get)]
    source_tensor: Py<PyArray1<i64>>,
    #[pyo3(get)]
    source_offset: Py<PyArray1<i64>>,
    #[pyo3(get)]
    target_tensor: Py<PyArray1<i64>>,
    #[pyo3(get)]
    target_offset: Py<PyArray1<i64>>,
    #[pyo3(get)]
    length: Py<PyArray1<i64>>,
    count: usize,
    /// Sum of all lengths.
    #[pyo3(get)]
    total_bytes: u64,
    /// Least length, 0 where there is none.
    #[pyo3(get)]
    min_bytes: u64,
}

impl Descriptors {
    /// Expands a schedule into arrays of numpy's own, which asks for huge pages where that helps.
    pub fn new(py: Python<'_>, schedule: &Schedule) -> PyResult<Self> {
        let expansion = py.detach(|| Expansion::new(schedule)).or_raise()?;
        // One array for all columns: large enough for huge pages where each by itself may not be.
        let table = py.import("numpy")?.call_method1("empty", ((5, expansion.len()), "int64"))?;
        let table = table.cast_into::<PyArray2<i64>>()?;
        let first = table.data().cast::<MaybeUninit<i64>>();
        // SAFETY: a new array is contiguous and aligned and holds so many elements, which may be
        // anything, and until it is returned nobody else has a reference to it.
        let mut rest = unsafe { slice::from_raw_parts_mut(first, 5 * expansion.len()) };
        let [source_tensor, source_offset, target_tensor, target_offset, length] =
            std::array::from_fn(|_| {
                let (column, others) = std::mem::take(&mut rest).split_at_mut(expansion.len());
                rest = others;
                column
            });
        let mut columns = Columns { source_tensor, source_offset, target_tensor, target_offset, length };
        py.detach(|| expansion.write(&mut columns));
        let column = |index: usize| -> PyResult<Py<PyArray1<i64>>> {
            Ok(table.get_item(index)?.cast_into::<PyArray1<i64>>()?.unbind())
        };
        Ok(Self {
            source_tensor: column(0)?,
            source_offset: column(1)?,
            target_tensor: column(2)?,
            target_offset: column(3)?,
            length: column(4)?,
            count: expansion.len(),
            total_bytes: schedule.num_bytes(),
            min_bytes: expansion.min_bytes(),
        })
    }
}

#[pymethods]
impl Descriptors {
    fn __len__(&self) -> usize {
        self.count
    }

    /// Average length, 0 where there is none.
    #[getter]
    #[expect(clippy::cast_precision_loss, reason = "an average is read by people")]
    fn mean_bytes(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.total_bytes as f64 / self.count as f64 }
    }

    fn __repr__(&self) -> String {
        format!("Descriptors(count={}, total_bytes={})", self.count, self.total_bytes)
    }
}
