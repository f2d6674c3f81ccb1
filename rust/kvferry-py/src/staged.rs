//! `Staged`: a transfer in two steps through a scratch buffer.

use std::sync::Arc;

use kvferry_core::Error;
use kvferry_core::memory::cache::RankCache;
use kvferry_core::memory::region::Region;
use kvferry_core::memory::tensor::{RawTensor, Tensor};
use kvferry_core::moves::overlap::{self, BoundSchedule};
use kvferry_core::moves::staging::{self, StagedRun};
use kvferry_cuda::Memory;
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;

use crate::cache::KVCache;
use crate::dlpack;
use crate::errors::{OrRaise, to_py};
use crate::execution::Execution;

/// A rank pair's transfer in two steps; made by `Plan.staged`.
///
/// First the moves of ``descriptors`` bring long contiguous runs of the source into a scratch buffer of
/// ``scratch_bytes`` on the target, possibly with bytes between them that are not due. Then `finish`
/// copies what is due to its places.
///
/// Attributes
/// ----------
/// scratch_bytes
///     Bytes that the scratch buffer must have.
/// descriptors
///     A `StagedDescriptors`.
#[pyclass(frozen, module = "kvferry._core")]
pub struct Staged {
    inner: staging::Staged,
    /// The target that the second step was worked out for.
    target: Arc<RankCache>,
    #[pyo3(get)]
    descriptors: Py<StagedDescriptors>,
}

impl Staged {
    /// Wraps the core's steps.
    pub fn new(py: Python<'_>, inner: staging::Staged, target: Arc<RankCache>) -> PyResult<Self> {
        let descriptors = Py::new(py, StagedDescriptors::new(py, &inner.runs))?;
        Ok(Self { inner, target, descriptors })
    }
}

#[pymethods]
impl Staged {
    #[getter]
    fn scratch_bytes(&self) -> u64 {
        self.inner.scratch_bytes
    }

    /// Copy what is due from scratch to its places; on host memory, it has finished when this returns.
    ///
    /// Parameters
    /// ----------
    /// scratch
    ///     A contiguous DLPack tensor of at least ``scratch_bytes``, which the moves of
    ///     ``descriptors`` have filled.
    /// target
    ///     The `KVCache` of the target rank.
    /// stream
    ///     A CUDA stream as a number (torch: ``stream.cuda_stream``); ``None``, 0: the default stream. Copies
    ///     of device memory are enqueued there, not waited for: order other streams and keep tensors alive
    ///     until it has passed (`kvferry.cuda`). Copies of host memory alone have finished, whatever it is.
    ///
    /// Raises
    /// ------
    /// LayoutError
    ///     The buffer is too small, not contiguous or on a device that cannot be copied from, or the
    ///     target's tensors have other strides than those that this was made for.
    /// OverlapError
    ///     The buffer shares memory with what is written.
    /// TransferError
    ///     The CUDA driver has failed: what was enqueued before may still run (`kvferry.cuda`).
    #[pyo3(signature = (scratch, target, *, stream=None))]
    fn finish(
        &self,
        py: Python<'_>,
        scratch: &Bound<'_, PyAny>,
        target: &Bound<'_, KVCache>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let execution = Execution::new(stream, None)?;
        // Both keep their memory alive until the copy is done.
        let (_owner, buffer) = dlpack::import("scratch", scratch)?;
        let scratch_bytes = contiguous_bytes(&buffer)?;
        if scratch_bytes < self.inner.scratch_bytes {
            return Err(to_py(Error::Layout(format!(
                "scratch has {scratch_bytes} bytes, the plan needs {}",
                self.inner.scratch_bytes
            ))));
        }
        let (target, memory) = (Arc::clone(&target.get().inner), Arc::clone(&target.get().memory));
        self.check_target(&target)?;
        let source = [Region {
            name: "scratch".to_owned(),
            address: buffer.address,
            extent_bytes: scratch_bytes,
            block_stride: scratch_bytes,
            device: buffer.device,
            writable: buffer.writable,
        }];
        let bound = BoundSchedule { schedule: &self.inner.finish, source: &source, target: &target.regions };
        py.detach(|| {
            overlap::check(&[bound], true)?;
            // SAFETY: the target is writable and strided as the one that the schedule was bound to
            // (`check_target`), and no byte is written twice or read (`check`). `_owner` and the caller's
            // `KVCache` keep host memory alive until this returns; that device memory outlives what is
            // enqueued, and that the stream exists, is said to be the part of Python's caller.
            unsafe { execution.copy(&[bound], &[[&Memory::default(), &memory]]) }
        })
        .or_raise()
    }

    fn __repr__(&self) -> String {
        format!("Staged(scratch_bytes={}, descriptors={})", self.inner.scratch_bytes, self.inner.runs.len())
    }
}

impl Staged {
    fn check_target(&self, target: &RankCache) -> PyResult<()> {
        let alike = |(a, b): (&Tensor, &Tensor)| (&a.sizes, &a.strides) == (&b.sizes, &b.strides);
        let is_same = self.target.rank == target.rank
            && *self.target.engine == *target.engine
            && self.target.tensors.iter().zip(&target.tensors).all(alike);
        if !is_same {
            return Err(to_py(Error::Layout(format!(
                "this was staged for rank {} of engine {:?} with tensors of other sizes or strides",
                self.target.rank, self.target.engine.id
            ))));
        }
        self.inner.finish.check_writable(&target.regions).or_raise()
    }
}

/// The size of a buffer without gaps.
fn contiguous_bytes(buffer: &RawTensor) -> PyResult<u64> {
    let mut bytes = buffer.item_bytes;
    for (&size, &stride) in buffer.shape.iter().zip(&buffer.strides).rev() {
        if size > 1 && u64::try_from(stride).ok() != Some(bytes) {
            return Err(to_py(Error::Layout("scratch is not contiguous; pass a flat buffer".to_owned())));
        }
        let grown = bytes.checked_mul(size.unsigned_abs()).filter(|bytes| i64::try_from(*bytes).is_ok());
        bytes = grown.ok_or_else(|| to_py(Error::Layout("scratch exceeds 2^63 bytes".to_owned())))?;
    }
    Ok(bytes)
}

/// The first step of a staged transfer as flat columns, sorted by source.
///
/// Row ``i`` moves ``length[i]`` bytes from ``source_offset[i]`` of tensor ``source_tensor[i]`` to
/// ``scratch_offset[i]``. All columns are int64 arrays of shape ``[len(self)]``, offsets count bytes.
#[pyclass(frozen, module = "kvferry._core")]
pub struct StagedDescriptors {
    #[pyo3(get)]
    source_tensor: Py<PyArray1<i64>>,
    #[pyo3(get)]
    source_offset: Py<PyArray1<i64>>,
    #[pyo3(get)]
    scratch_offset: Py<PyArray1<i64>>,
    #[pyo3(get)]
    length: Py<PyArray1<i64>>,
    count: usize,
    /// Sum of all lengths.
    #[pyo3(get)]
    total_bytes: u64,
}

impl StagedDescriptors {
    fn new(py: Python<'_>, runs: &[StagedRun]) -> Self {
        let column = |value: fn(&StagedRun) -> u64| {
            // Offsets lie inside a tensor, and no tensor reaches 2^63 bytes.
            let column: Vec<i64> = runs.iter().map(|run| value(run).cast_signed()).collect();
            column.into_pyarray(py).unbind()
        };
        Self {
            source_tensor: column(|run| run.source_tensor as u64),
            source_offset: column(|run| run.source_offset),
            scratch_offset: column(|run| run.scratch_offset),
            length: column(|run| run.length),
            count: runs.len(),
            total_bytes: runs.iter().map(|run| run.length).sum(),
        }
    }
}

#[pymethods]
impl StagedDescriptors {
    fn __len__(&self) -> usize {
        self.count
    }

    fn __repr__(&self) -> String {
        format!("StagedDescriptors(count={}, total_bytes={})", self.count, self.total_bytes)
    }
}
