//! `kvferry.cuda`: whether GPUs can be used.

use pyo3::prelude::*;

/// Why memory of GPUs cannot be copied here; `None` where it can.
#[pyfunction]
pub fn cuda_unavailable_reason() -> Option<String> {
    kvferry_cuda::available().err()
}

/// The library that takes the place of the driver where it is loaded first, for tests without a GPU.
#[cfg(feature = "emulated")]
#[pyfunction]
#[pyo3(name = "_emulated_driver")]
pub fn emulated_driver() -> &'static str {
    kvferry_cuda::emulated::DRIVER
}
