//! Memory: where tensors' bytes are, as the device that copies them sees them.

use std::ffi::c_void;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{
    self, CUDA_POINTER_ATTRIBUTE_ACCESS_FLAGS_enum as Access, CUmemorytype, CUpointer_attribute as Attribute,
    CUresult,
};
use kvferry_core::memory::region::Region;
use kvferry_core::memory::tensor;
use kvferry_core::{Error, Result};

use crate::driver::check;
use crate::driver::device::Device;

/// What the driver says of some tensors' memory: asked when it is first needed, and good as long as the
/// tensors live.
#[derive(Debug, Default)]
pub struct Memory(OnceLock<Box<[OnceLock<Known>]>>);

#[derive(Debug)]
struct Known {
    place: Place,
    /// The device whose context was current.
    asked_on: i32,
    /// Devices that can access it, each a bit.
    accessible_from: AtomicU64,
}

/// One tensor's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its first byte.
    pub address: u64,
    /// Its first byte for a kernel, where one can address all of it.
    pub device_address: Option<u64>,
    /// Whose it is.
    pub owner: Owner,
    /// Whether the copy engine can copy any part of it at once.
    pub is_whole: bool,
}

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    Host,
    Device(i32),
    /// The driver moves it to where it is used.
    Managed,
}

/// The device that a tensor is said to lie on, if on one.
pub fn ordinal(region: &Region) -> Option<i32> {
    (region.device.kind == tensor::Device::CUDA).then_some(region.device.index)
}

/// The device that the driver was asked for when it allocated what it moves about.
pub fn managed_ordinal(region: &Region) -> Option<i32> {
    (region.device.kind == tensor::Device::CUDA_MANAGED).then_some(region.device.index)
}

impl Memory {
    /// Where one of the tensors that this is of lies; refused where `device`, whose context must be current,
    /// cannot copy it without waiting.
    pub(crate) fn place(&self, regions: &[Region], tensor: usize, device: &Device) -> Result<Place> {
        let all = self.0.get_or_init(|| regions.iter().map(|_| OnceLock::new()).collect());
        let known = if let Some(known) = all[tensor].get() {
            known
        } else {
            let (place, asked_on) = (place(&regions[tensor])?, device.ordinal);
            all[tensor].get_or_init(|| Known { place, asked_on, accessible_from: AtomicU64::new(0) })
        };
        // Devices may see pinned memory at different addresses.
        if known.place.owner == Owner::Host && known.asked_on != device.ordinal {
            return place(&regions[tensor]);
        }
        known.check_access(&regions[tensor], device)?;
        Ok(known.place)
    }
}

impl Known {
    /// Refuses memory of another device that this one cannot read and write.
    fn check_access(&self, region: &Region, device: &Device) -> Result<()> {
        let Owner::Device(ordinal) = self.place.owner else { return Ok(()) };
        let bit =
            u32::try_from(device.ordinal).ok().and_then(|ordinal| 1_u64.checked_shl(ordinal)).unwrap_or(0);
        if ordinal == device.ordinal || self.accessible_from.load(Ordering::Relaxed) & bit != 0 {
            return Ok(());
        }
        device.check_peer(ordinal)?;
        // Access between contexts covers what each of them allocates, but not what is mapped by hand or comes
        // from a pool.
        let (mut is_of_context, mut access) = (0_i32, Access::CU_POINTER_ATTRIBUTE_ACCESS_FLAG_NONE as u32);
        let of_context = Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
        let can_access = ask(&mut is_of_context, of_context, region.address) && is_of_context != 0
            || ask(&mut access, Attribute::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS, region.address)
                && access == Access::CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE as u32;
        if !can_access {
            return Err(Error::Layout(format!(
                "{} lies on cuda:{ordinal} in a pool or a mapping to which cuda:{} was given no access: whoever \
                 allocates it can give it, or copy through the host",
                region.name, device.ordinal
            )));
        }
        self.accessible_from.fetch_or(bit, Ordering::Relaxed);
        Ok(())
    }
}

/// Finds a tensor's memory, and refuses what it is not said to be. A context must be current.
fn place(region: &Region) -> Result<Place> {
    let Region { address, extent_bytes, device, .. } = region;
    let owner = match (ordinal(region), device.kind) {
        (Some(ordinal), _) => Owner::Device(ordinal),
        (None, tensor::Device::CUDA_MANAGED) => Owner::Managed,
        _ if device.is_host() => Owner::Host,
        _ => return Err(Error::Layout(format!("{} lies on {device}, which CUDA cannot copy", region.name))),
    };
    let place = Place { address: *address, device_address: Some(*address), owner, is_whole: true };
    match owner {
        _ if *extent_bytes == 0 => Ok(place),
        Owner::Managed if Allocation::of(*address)?.managed != 0 => Ok(place),
        Owner::Managed => {
            let name = &region.name;
            Err(Error::Layout(format!("{name} is said to be managed memory, which the driver does not know")))
        }
        Owner::Device(ordinal) => {
            let found = Allocation::of(*address)?;
            if found.managed != 0 || found.is(CUmemorytype::CU_MEMORYTYPE_DEVICE) && found.ordinal == ordinal
            {
                return Ok(place);
            }
            let lies = if found.is(CUmemorytype::CU_MEMORYTYPE_DEVICE) {
                format!("lies on cuda:{}", found.ordinal)
            } else {
                "is no memory of a device".to_owned()
            };
            Err(Error::Layout(format!("{} is said to lie on cuda:{ordinal}, but {lies}", region.name)))
        }
        Owner::Host => pinned(region, place),
    }
}

/// Host memory that is pinned from the first byte to the last, perhaps in several parts.
fn pinned(region: &Region, place: Place) -> Result<Place> {
    let Region { address, extent_bytes, name, .. } = region;
    let (mut at, end) = (*address, address + extent_bytes);
    let (mut device_address, mut parts) = (None, Vec::new());
    while at < end {
        let part = Allocation::of(at)?;
        if part.managed == 0 && !part.is(CUmemorytype::CU_MEMORYTYPE_HOST) {
            return Err(Error::Layout(format!(
                "{name} lies in host memory that is not pinned; a copy on a stream needs pinned memory"
            )));
        }
        let is_next = device_address.is_some_and(|first| part.device_address == first + (at - address));
        device_address = match parts.as_slice() {
            [] => Some(part.device_address).filter(|mapped| *mapped != 0),
            _ => device_address.filter(|_| is_next),
        };
        // Where the driver does not say how far it reaches, it is asked about the last byte.
        at = part.end_behind(at).unwrap_or(if at + 1 < end { end - 1 } else { end });
        parts.push(part.buffer_id);
    }
    parts.dedup();
    Ok(Place { device_address, is_whole: parts.len() == 1, ..place })
}

/// What the driver says of the memory at an address; nothing that it knows has a kind.
#[derive(Clone, Copy, Debug, Default)]
struct Allocation {
    kind: u32,
    ordinal: i32,
    /// Some other number than zero where the driver moves it.
    managed: u32,
    device_address: u64,
    /// No other allocation's.
    buffer_id: u64,
    begin: u64,
    num_bytes: usize,
}

impl Allocation {
    fn of(address: u64) -> Result<Self> {
        let mut found = Self::default();
        let asked = [
            (Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, ptr::from_mut(&mut found.kind).cast::<c_void>()),
            (Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, ptr::from_mut(&mut found.ordinal).cast()),
            (Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED, ptr::from_mut(&mut found.managed).cast()),
            (Attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER, ptr::from_mut(&mut found.device_address).cast()),
            (Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, ptr::from_mut(&mut found.buffer_id).cast()),
            (Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, ptr::from_mut(&mut found.begin).cast()),
            (Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE, ptr::from_mut(&mut found.num_bytes).cast()),
        ];
        let (mut attributes, mut answers) = (asked.map(|asked| asked.0), asked.map(|asked| asked.1));
        let count = u32::try_from(asked.len()).expect("a few");
        // SAFETY: the library is there and a context current; each answer has the size of its attribute.
        let answer = unsafe {
            sys::cuPointerGetAttributes(count, attributes.as_mut_ptr(), answers.as_mut_ptr(), address)
        };
        check(answer, "asking about memory")?;
        Ok(found)
    }

    fn is(&self, kind: CUmemorytype) -> bool {
        self.kind == kind as u32
    }

    /// Where it ends, if it has this address.
    fn end_behind(&self, address: u64) -> Option<u64> {
        let end = self.begin.checked_add(self.num_bytes as u64)?;
        (self.begin <= address && address < end).then_some(end)
    }
}

/// Asks the driver one thing about an address; whether it knows.
fn ask<T: Copy>(answer: &mut T, attribute: Attribute, address: u64) -> bool {
    let answer = ptr::from_mut(answer).cast::<c_void>();
    // SAFETY: the library is there and a context current; each attribute that is asked for here has the size
    // of its `T`.
    unsafe { sys::cuPointerGetAttribute(answer, attribute, address) == CUresult::CUDA_SUCCESS }
}
