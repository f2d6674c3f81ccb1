//! Memory: where tensors' bytes are, as the device that copies them sees them.

use std::ffi::c_void;

use cudarc::driver::sys::{self, CUmemorytype, CUpointer_attribute as Attribute};
use kvferry_core::memory::region::Region;
use kvferry_core::{Error, Result};

use crate::driver::device::Device;

/// `DLPack`'s number of memory of a CUDA device.
const CUDA: i32 = 2;
/// `DLPack`'s number of memory that the driver moves between host and devices.
const CUDA_MANAGED: i32 = 13;

/// One tensor's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its first byte for the copy engine.
    pub address: u64,
    /// Its first byte for a kernel, where one can address it.
    pub device_address: Option<u64>,
    /// Whether it is the host's.
    pub is_host: bool,
}

/// The device that a tensor lies on, if on one.
pub fn ordinal(region: &Region) -> Option<i32> {
    (region.device.kind == CUDA).then_some(region.device.index)
}

/// Finds a tensor's memory, and refuses what `device` cannot copy without waiting. Its context must be current.
pub fn place(region: &Region, device: &Device) -> Result<Place> {
    let Region { address, name, .. } = region;
    if let Some(ordinal) = ordinal(region) {
        device.check_peer(ordinal)?;
    } else if region.device.is_host() {
        return pinned(region);
    } else if region.device.kind != CUDA_MANAGED {
        return Err(Error::Layout(format!("{name} lies on {}, which CUDA cannot copy", region.device)));
    }
    Ok(Place { address: *address, device_address: Some(*address), is_host: false })
}

/// Refuses a tensor that is said to lie on another device than it does. Its device's context must be current.
pub fn check_device(region: &Region) -> Result<()> {
    let Some(ordinal) = ordinal(region).filter(|_| region.extent_bytes > 0) else { return Ok(()) };
    let mut found: i32 = -1;
    if !ask(&mut found, Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, region.address) || found != ordinal {
        let whose =
            if found < 0 { "is no memory of a device".to_owned() } else { format!("lies on cuda:{found}") };
        return Err(Error::Layout(format!("{} is said to lie on cuda:{ordinal}, but {whose}", region.name)));
    }
    Ok(())
}

/// Host memory that the driver knows, from the first byte to the last.
fn pinned(region: &Region) -> Result<Place> {
    let Region { address, extent_bytes, name, .. } = region;
    let is_pinned = |address: u64| {
        let mut kind: u32 = 0;
        ask(&mut kind, Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
            && kind == CUmemorytype::CU_MEMORYTYPE_HOST as u32
    };
    if *extent_bytes > 0 && !(is_pinned(*address) && is_pinned(address + extent_bytes - 1)) {
        return Err(Error::Layout(format!(
            "{name} lies in host memory that is not pinned; a copy on a stream needs pinned memory"
        )));
    }
    let mut mapped: u64 = 0;
    let is_mapped = ask(&mut mapped, Attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER, *address);
    let device_address = (is_mapped && mapped != 0).then_some(mapped);
    Ok(Place { address: *address, device_address, is_host: true })
}

/// Asks the driver about an address; whether it knows.
fn ask<T: Copy>(answer: &mut T, attribute: Attribute, address: u64) -> bool {
    let answer = std::ptr::from_mut(answer).cast::<c_void>();
    // SAFETY: the library is there and a context current; each attribute that is asked for here has the size
    // of its `T`.
    unsafe { sys::cuPointerGetAttribute(answer, attribute, address) == sys::CUresult::CUDA_SUCCESS }
}
