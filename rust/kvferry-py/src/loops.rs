//! `Loops`: a plan's strided loops as columns, for an executor of the user's own.

use kvferry_core::moves::schedule::CopyLoop;
use kvferry_core::moves::schedule::Schedule;
use kvferry_core::moves::strided::{Dim, MAX_DIMS};
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

/// The moves of one rank pair as compact loops.
///
/// Row ``r`` stands for a run of ``run_bytes[r]`` bytes from ``source_offset + source_table[e] +
/// i·source_strides`` of tensor ``source_tensor`` to ``target_offset + target_table[e] +
/// i·target_strides`` of tensor ``target_tensor``, for every entry ``e`` in ``[table_begin[r],
/// table_end[r])`` and every index ``i`` below ``counts[r]``. All columns are int64 arrays of shape
/// ``[len(self)]``; ``counts`` and both strides are ``[len(self), 4]``, outermost first with unused
/// counts of 1; the tables are shared by all rows.
#[pyclass(frozen, module = "kvferry._core")]
pub struct Loops {
    #[pyo3(get)]
    source_tensor: Py<PyArray1<i64>>,
    #[pyo3(get)]
    source_offset: Py<PyArray1<i64>>,
    #[pyo3(get)]
    target_tensor: Py<PyArray1<i64>>,
    #[pyo3(get)]
    target_offset: Py<PyArray1<i64>>,
    #[pyo3(get)]
    run_bytes: Py<PyArray1<i64>>,
    #[pyo3(get)]
    counts: Py<PyArray2<i64>>,
    #[pyo3(get)]
    source_strides: Py<PyArray2<i64>>,
    #[pyo3(get)]
    target_strides: Py<PyArray2<i64>>,
    #[pyo3(get)]
    table_begin: Py<PyArray1<i64>>,
    #[pyo3(get)]
    table_end: Py<PyArray1<i64>>,
    #[pyo3(get)]
    source_table: Py<PyArray1<i64>>,
    #[pyo3(get)]
    target_table: Py<PyArray1<i64>>,
    count: usize,
    /// Payload.
    #[pyo3(get)]
    total_bytes: u64,
}

impl Loops {
    /// Columns of a schedule.
    pub fn new(py: Python<'_>, schedule: Schedule) -> PyResult<Self> {
        // Offsets and strides lie inside a tensor, and no tensor reaches 2^63 bytes.
        let signed = |numbers: Vec<u64>| -> Py<PyArray1<i64>> {
            let signed: Vec<i64> = numbers.into_iter().map(u64::cast_signed).collect();
            signed.into_pyarray(py).unbind()
        };
        let total_bytes = schedule.num_bytes();
        let Schedule { loops, table } = schedule;
        let column = |value: fn(&CopyLoop) -> u64| signed(loops.iter().map(value).collect());
        let dims = |value: fn(&Dim) -> u64| -> PyResult<Py<PyArray2<i64>>> {
            let flat = loops.iter().flat_map(|copy| copy.strided.dims.iter().map(value)).collect();
            Ok(signed(flat).bind(py).reshape([loops.len(), MAX_DIMS])?.unbind())
        };
        Ok(Self {
            source_tensor: column(|copy| copy.source_tensor as u64),
            source_offset: column(|copy| copy.source_offset),
            target_tensor: column(|copy| copy.target_tensor as u64),
            target_offset: column(|copy| copy.target_offset),
            run_bytes: column(|copy| copy.strided.run_bytes),
            counts: dims(|dim| dim.count)?,
            source_strides: dims(|dim| dim.source_stride)?,
            target_strides: dims(|dim| dim.target_stride)?,
            table_begin: column(|copy| copy.entries.start as u64),
            table_end: column(|copy| copy.entries.end as u64),
            count: loops.len(),
            total_bytes,
            source_table: signed(table.source),
            target_table: signed(table.target),
        })
    }
}

#[pymethods]
impl Loops {
    fn __len__(&self) -> usize {
        self.count
    }

    fn __repr__(&self) -> String {
        format!("Loops(count={}, total_bytes={})", self.count, self.total_bytes)
    }
}
