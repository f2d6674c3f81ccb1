//! `Descriptors`: flat columns for a transport.

use kvferry_core::expand::Fragment;
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;

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
    /// Columns of the given fragments.
    pub fn new(py: Python<'_>, fragments: &[Fragment]) -> Self {
        let column = |value: fn(&Fragment) -> u64| {
            // Offsets lie inside a tensor, and no tensor reaches 2^63 bytes.
            let column: Vec<i64> = fragments.iter().map(|fragment| value(fragment).cast_signed()).collect();
            column.into_pyarray(py).unbind()
        };
        Self {
            source_tensor: column(|fragment| fragment.source_tensor as u64),
            source_offset: column(|fragment| fragment.source_offset),
            target_tensor: column(|fragment| fragment.target_tensor as u64),
            target_offset: column(|fragment| fragment.target_offset),
            length: column(|fragment| fragment.length),
            count: fragments.len(),
            total_bytes: fragments.iter().map(|fragment| fragment.length).sum(),
            min_bytes: fragments.iter().map(|fragment| fragment.length).min().unwrap_or(0),
        }
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
