//! `kvferry.cuda`: whether GPUs can be used.

use pyo3::prelude::*;

/// Why memory of GPUs cannot be copied here; `None` where it can.
#[pyfunction]
pub fn cuda_unavailable_reason() -> Option<String> {
    kvferry_cuda::available().err()
}
