//! `kvferry.cuda`: whether GPUs can be used.

use pyo3::prelude::*;

/// Why memory of GPUs cannot be copied here; `None` where it can.
#[pyfunction]
pub fn cuda_unavailable_reason() -> Option<String> {
    kvferry_cuda::available().err()
}

/// The library that takes the driver's place in tests, where the build has one.
#[cfg(feature = "emulated")]
pub const EMULATED_DRIVER: Option<&str> = Some(kvferry_cuda::emulated::DRIVER);
/// The library that takes the driver's place in tests, where the build has one.
#[cfg(not(feature = "emulated"))]
pub const EMULATED_DRIVER: Option<&str> = None;
