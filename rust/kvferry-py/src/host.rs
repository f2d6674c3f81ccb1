//! Copies on host memory: how many threads share them, and which kernels there are.

use std::num::NonZeroUsize;

use kvferry_core::moves::overlap::BoundSchedule;
use kvferry_core::{Error, Result};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::args;

/// Copies what schedules that run together move. An error has changed nothing.
///
/// # Safety
///
/// Until this returns, every region must be host memory that its owner keeps alive, target regions must be
/// writable, and no byte may be written twice, or read and written. That nobody else uses what is written
/// meanwhile is the part of Python's callers, as for any tensor operation.
pub unsafe fn copy(bound: &[BoundSchedule<'_>], threads: Option<usize>) -> Result<()> {
    check_kernel()?;
    // SAFETY: the caller guarantees the memory and the schedules.
    unsafe { kvferry_copy::copy(bound, threads) };
    Ok(())
}

/// Refuses an environment that names a kernel which this machine does not have.
pub fn check_kernel() -> Result<()> {
    kvferry_copy::forced_kernel().map(drop).map_err(Error::Value)
}

/// The copy kernels that this machine can run.
///
/// Which one is used depends on what is copied; the environment variable ``KVFERRY_KERNEL``, read once
/// before the first copy, forces one of them.
///
/// Returns
/// -------
/// tuple of str
///     Names, the best last.
///
/// Examples
/// --------
/// >>> from kvferry.copy import kernels
/// >>> kernels()[0]
/// 'portable'
#[pyfunction]
pub fn kernels(py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
    let names: Vec<&str> = kvferry_copy::supported_kernels().map(|(name, _)| name).collect();
    PyTuple::new(py, names)
}

/// How many threads take part in a copy where a call does not say.
///
/// Returns
/// -------
/// int
///     The caller's thread included; small copies use fewer.
#[pyfunction]
pub fn get_num_threads() -> usize {
    kvferry_copy::default_threads()
}

/// Set how many threads take part in a copy where a call does not say.
///
/// Parameters
/// ----------
/// threads
///     The caller's thread included, at most 16 are used; ``None``: as many as the machine runs at once.
///
/// Raises
/// ------
/// ValueError
///     A number that is not positive.
///
/// Examples
/// --------
/// >>> from kvferry.copy import get_num_threads, set_num_threads
/// >>> set_num_threads(1)
/// >>> get_num_threads()
/// 1
/// >>> set_num_threads(None)
#[pyfunction]
#[pyo3(signature = (threads))]
pub fn set_num_threads(threads: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    kvferry_copy::set_default_threads(args::threads(threads)?.and_then(NonZeroUsize::new));
    Ok(())
}
