//! `kvferry.cuda`: whether GPUs can be used, and how fast the bus to one is.

use kvferry_cuda::calibrate::{BusSpeeds, Calibration, Speeds, calibrate};
use kvferry_cuda::choose::Thresholds;
use pyo3::prelude::*;

use crate::args::natural;
use crate::errors::OrRaise;

/// Why memory of GPUs cannot be copied here; `None` where it can.
#[pyfunction]
pub fn cuda_unavailable_reason(py: Python<'_>) -> Option<String> {
    py.detach(|| kvferry_cuda::available().err()) // the driver may take seconds to start
}

/// Speeds by size of fragment: bytes of each, and bytes per second by a kernel and by the copy engine.
type Fragments = Vec<(u64, f64, f64)>;
/// Bytes per second of one contiguous copy, and speeds of fragments.
type Bus = (f64, Fragments);

/// Measures the bus of a device: uploads, downloads, and the three thresholds that they ask for.
#[pyfunction]
pub fn calibrate_cuda(
    py: Python<'_>,
    device: &Bound<'_, PyAny>,
    total_bytes: u64,
) -> PyResult<(Bus, Bus, [u64; 3])> {
    let ordinal = natural("device", device)?;
    let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX); // there are never so many
    let Calibration { upload, download, thresholds } =
        py.detach(|| calibrate(ordinal, total_bytes)).or_raise()?;
    let bus = |bus: BusSpeeds| {
        let fragment = |speeds: &Speeds| (speeds.num_bytes, speeds.kernel, speeds.engine);
        (bus.plain, bus.fragments.iter().map(fragment).collect())
    };
    let Thresholds { upload_bytes, download_bytes, min_kernel_pieces } = thresholds;
    Ok((bus(upload), bus(download), [upload_bytes, download_bytes, min_kernel_pieces]))
}

/// The library that takes the driver's place in tests, where the build has one.
#[cfg(feature = "emulated")]
pub const EMULATED_DRIVER: Option<&str> = Some(kvferry_cuda::emulated::DRIVER);
/// The library that takes the driver's place in tests, where the build has one.
#[cfg(not(feature = "emulated"))]
pub const EMULATED_DRIVER: Option<&str> = None;
