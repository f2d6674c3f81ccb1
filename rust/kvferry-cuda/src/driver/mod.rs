//! The driver: opened where there is one, and asked for devices, streams, memory and launches.

mod chunk;
pub mod device;
pub mod engine;
pub mod memory;
pub mod scratch;
pub mod stream;
pub mod tables;

use std::ffi::CStr;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys::{self, CUresult};
use kvferry_copy::fork;
use kvferry_core::{Error, Result};

/// The kernels for all devices, or why there are none.
#[cfg(kernels)]
pub const KERNELS: std::result::Result<&[u8], &str> = Ok({
    /// The driver reads the image as numbers of several bytes.
    #[repr(C, align(16))]
    struct Aligned<T: ?Sized>(T);
    const ALIGNED: &Aligned<[u8]> = &Aligned(*include_bytes!(env!("KVFERRY_KERNELS")));
    &ALIGNED.0
});
/// The kernels for all devices, or why there are none.
#[cfg(not(kernels))]
pub const KERNELS: std::result::Result<&[u8], &str> = Err(env!("KVFERRY_WITHOUT_KERNELS"));

/// Set in children that were forked from a process after that had started the driver.
static IS_FORKED: AtomicBool = AtomicBool::new(false);

/// Whether devices can be used, or why not. Found out once, which starts the driver in this process: children
/// that are forked later cannot use it.
pub fn available() -> std::result::Result<(), String> {
    static AVAILABLE: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    // A child asks nothing that another thread of its parent may have been asking when it was forked.
    let is_forked = IS_FORKED.load(Ordering::Relaxed);
    let known = if is_forked { AVAILABLE.get() } else { Some(AVAILABLE.get_or_init(find_out)) };
    match known {
        Some(Err(reason)) => Err(reason.clone()),
        _ if is_forked => Err("this process was forked after the CUDA driver was started, which drivers do \
                               not survive: start it anew instead (multiprocessing: spawn)"
            .to_owned()),
        _ => Ok(()),
    }
}

fn find_out() -> std::result::Result<(), String> {
    extern "C" fn forked() {
        IS_FORKED.store(true, Ordering::Relaxed);
    }
    KERNELS.map_err(|reason| format!("this build has no CUDA kernels: {reason}"))?;
    if !fork::tell_children(forked) {
        return Err("there is no memory to watch for forks".to_owned());
    }
    // SAFETY: loading the driver's library runs its initializers, which any program may do.
    if !unsafe { sys::is_culib_present() } {
        return Err("the CUDA driver (libcuda) cannot be loaded".to_owned());
    }
    let mut version = 0;
    // SAFETY: the library is there; the pointer is valid for a number.
    let asked = unsafe {
        check(sys::cuInit(0), "starting the CUDA driver")
            .and_then(|()| check(sys::cuDriverGetVersion(&raw mut version), "asking for its version"))
    };
    asked.map_err(|error| error.to_string())?;
    let oldest = option_env!("KVFERRY_OLDEST_DRIVER").and_then(|oldest| oldest.parse().ok()).unwrap_or(0);
    if version < oldest {
        let (given, needed) = (in_words(version), in_words(oldest));
        return Err(format!("the CUDA driver is for CUDA {given}, older than {needed}"));
    }
    let capabilities = capabilities().map_err(|error| error.to_string())?;
    match capabilities.iter().max() {
        None => Err("the CUDA driver has no device".to_owned()),
        Some(newest) if *newest < device::MIN_CAPABILITY => Err(format!(
            "no device here has compute capability {} or later",
            device::in_words(device::MIN_CAPABILITY)
        )),
        Some(_) => Ok(()),
    }
}

/// Of all devices, those that cannot be used included.
fn capabilities() -> Result<Vec<(u64, u64)>> {
    let mut count = 0;
    // SAFETY: the library is there and started; the pointer is valid for a number.
    check(unsafe { sys::cuDeviceGetCount(&raw mut count) }, "counting devices")?;
    let capability = |ordinal| {
        let mut handle = 0;
        // SAFETY: as above.
        check(unsafe { sys::cuDeviceGet(&raw mut handle, ordinal) }, "opening the device")?;
        device::capability(handle)
    };
    (0..count).map(capability).collect()
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
        CUresult::CUDA_ERROR_NOT_SUPPORTED => {
            Err(Error::Layout(format!("{what}: the device or its driver does not support that")))
        }
        CUresult::CUDA_ERROR_NOT_INITIALIZED => Err(Error::Layout(format!(
            "{what}: the driver is not started; was this process forked from one that had started it?"
        ))),
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
