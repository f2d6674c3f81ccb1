//! Host copies: how many threads share them, and which kernels there are.

use std::num::NonZeroUsize;

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::args;

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
