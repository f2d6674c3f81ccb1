//! The driver: opened where there is one, and asked for devices, streams, memory and launches.

pub mod device;
pub mod engine;
pub mod memory;
pub mod scratch;
pub mod stream;
pub mod tables;

use std::ffi::CStr;
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUresult};
use kvferry_core::{Error, Result};

/// The oldest driver that is used: functions are looked up by version from there on.
const MIN_VERSION: i32 = 12000;

/// The kernels for all devices, or why there are none.
#[cfg(kernels)]
pub const KERNELS: std::result::Result<&[u8], &str> = Ok(include_bytes!(env!("KVFERRY_KERNELS")));
/// The kernels for all devices, or why there are none.
#[cfg(not(kernels))]
pub const KERNELS: std::result::Result<&[u8], &str> = Err(env!("KVFERRY_WITHOUT_KERNELS"));

/// Whether devices can be used, or why not. Found out once.
pub fn available() -> std::result::Result<(), String> {
    static AVAILABLE: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    AVAILABLE.get_or_init(find_out).clone()
}

fn find_out() -> std::result::Result<(), String> {
    KERNELS.map_err(|reason| format!("this build has no CUDA kernels: {reason}"))?;
    // SAFETY: loading the driver's library runs its initializers, which any program may do.
    if !unsafe { sys::is_culib_present() } {
        return Err("the CUDA driver (libcuda) cannot be loaded".to_owned());
    }
    let (mut version, mut devices) = (0, 0);
    // SAFETY: the library is there; both pointers are valid for a number.
    let asked = unsafe {
        check(sys::cuInit(0), "starting the CUDA driver")
            .and_then(|()| check(sys::cuDriverGetVersion(&raw mut version), "asking for its version"))
            .and_then(|()| check(sys::cuDeviceGetCount(&raw mut devices), "counting devices"))
    };
    asked.map_err(|error| error.to_string())?;
    if version < MIN_VERSION {
        return Err(format!("the CUDA driver is for CUDA {}, older than 12.0", in_words(version)));
    }
    if devices == 0 {
        return Err("the CUDA driver has no device".to_owned());
    }
    Ok(())
}

/// A version such as 13000.
fn in_words(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Refuses where [`available`] does.
pub fn check_available() -> Result<()> {
    available().map_err(|reason| Error::Layout(format!("CUDA memory cannot be copied: {reason}")))
}

/// The driver's answer as a result; `what` says what it was asked.
pub fn check(answer: CUresult, what: &str) -> Result<()> {
    match answer {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            Err(Error::Memory(format!("{what}: the device, or pinned memory, has no room")))
        }
        _ => Err(Error::Transfer(format!("{what}: {}", name(answer)))),
    }
}

fn name(answer: CUresult) -> String {
    let mut name = ptr::null();
    // SAFETY: the library is there, as it has answered; a name that it gives is a constant of its own.
    unsafe {
        if sys::cuGetErrorName(answer, &raw mut name) == CUresult::CUDA_SUCCESS && !name.is_null() {
            return CStr::from_ptr(name).to_string_lossy().into_owned();
        }
    }
    format!("CUDA error {}", answer as u32)
}
