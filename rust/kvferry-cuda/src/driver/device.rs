//! Devices: each with its primary context, the kernels loaded into it, and what stays resident there.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute as Attribute, CUfunction, CUfunction_attribute, CUresult,
};
use kvferry_core::{Error, Result};

use crate::driver::stream::{Stream, Uncaptured};
use crate::driver::tables::Tables;
use crate::driver::{KERNELS, check, check_available};
use crate::job::DEVICE_THREADS;
use crate::records::narrow;

/// Bytes that a block shares at most where others are to run beside it, which every device allows.
pub const USUAL_SHARED_BYTES: u64 = 48 << 10;

/// The oldest devices for which there are kernels, by compute capability.
pub const MIN_CAPABILITY: (u64, u64) = (8, 0);

/// A kernel, and how many of its blocks run at once.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    function: CUfunction,
    resident_blocks: u64,
}

/// One device of this process. It is never given back: the primary context is the process's.
#[derive(Debug)]
pub struct Device {
    /// What frameworks call it.
    pub ordinal: i32,
    handle: CUdevice,
    context: CUcontext,
    multiprocessors: u64,
    /// Bytes that a block can share.
    pub most_shared_bytes: u64,
    pub copy_loops: Kernel,
    pub copy_runs: Kernel,
    pub transpose: Kernel,
    tables: Mutex<Tables>,
    peers: Mutex<Vec<i32>>,
}

// SAFETY: handles of the driver, which any thread may use; what changes is behind locks.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// A context that is current until this is dropped.
pub struct Current;

impl Drop for Current {
    fn drop(&mut self) {
        let mut context = ptr::null_mut();
        // SAFETY: the library is there; it takes back what `make_current` pushed.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut context) };
    }
}

impl Device {
    /// The device that frameworks call `cuda:ordinal`, made ready when it is first asked for.
    pub fn get(ordinal: i32) -> Result<&'static Self> {
        static DEVICES: Mutex<BTreeMap<i32, &'static Device>> = Mutex::new(BTreeMap::new());
        check_available()?;
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = devices.get(&ordinal) {
            return Ok(device);
        }
        let device: &'static Self = Box::leak(Box::new(Self::open(ordinal)?));
        devices.insert(ordinal, device);
        Ok(device)
    }

    fn open(ordinal: i32) -> Result<Self> {
        let (mut count, mut handle, mut context) = (0, 0, ptr::null_mut());
        // SAFETY: the library is there and started; every pointer is valid for what is asked.
        unsafe {
            check(sys::cuDeviceGetCount(&raw mut count), "counting devices")?;
            if !(0..count).contains(&ordinal) {
                return Err(Error::Layout(format!(
                    "device cuda:{ordinal} is none of the {count} devices here"
                )));
            }
            check(sys::cuDeviceGet(&raw mut handle, ordinal), "opening the device")?;
        }
        let capability = capability(handle)?;
        if capability < MIN_CAPABILITY {
            return Err(Error::Layout(format!(
                "cuda:{ordinal} has compute capability {}, older than {} for which there are kernels",
                in_words(capability),
                in_words(MIN_CAPABILITY)
            )));
        }
        // What follows is no part of what some thread may be capturing.
        let before = Uncaptured::begin()?;
        // SAFETY: as above.
        let answer = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, handle) };
        check(answer, "opening the device's context")?;
        let _current = make_current(context)?;
        let _uncaptured = before.map_or_else(Uncaptured::begin, |before| Ok(Some(before)))?;
        let multiprocessors = attribute(handle, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let most_shared_bytes =
            attribute(handle, Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let kernels = load(ordinal)?;
        let kernel = |name: &CStr| -> Result<Kernel> {
            let mut function = ptr::null_mut();
            // SAFETY: the library is there, the module loaded, the name ends.
            let answer = unsafe { sys::cuModuleGetFunction(&raw mut function, kernels, name.as_ptr()) };
            check(answer, "finding a kernel")?;
            Ok(Kernel { function, resident_blocks: multiprocessors * blocks_at_once(function, 0)? })
        };
        let transpose = kernel(c"kvferry_transpose")?;
        let shared_bytes = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let most = i32::try_from(most_shared_bytes).unwrap_or(i32::MAX);
        // SAFETY: the function was found just now.
        let answer = unsafe { sys::cuFuncSetAttribute(transpose.function, shared_bytes, most) };
        check(answer, "asking for shared memory")?;
        Ok(Self {
            ordinal,
            handle,
            context,
            multiprocessors,
            most_shared_bytes,
            copy_loops: kernel(c"kvferry_copy_loops")?,
            copy_runs: kernel(c"kvferry_copy_runs")?,
            transpose,
            tables: Mutex::new(Tables::default()),
            peers: Mutex::default(),
        })
    }

    /// The device whose context this is, if it is a primary one.
    pub fn of_context(context: CUcontext) -> Result<&'static Self> {
        let mut handle = 0;
        let current = make_current(context)?;
        // SAFETY: the library is there and a context current.
        check(unsafe { sys::cuCtxGetDevice(&raw mut handle) }, "asking for the stream's device")?;
        drop(current);
        // The driver numbers devices as frameworks do.
        let device = Self::get(handle)?;
        if device.context != context {
            return Err(Error::Value(format!(
                "the stream was made in a context of cuda:{handle} other than its primary one"
            )));
        }
        Ok(device)
    }

    /// Makes its context current on this thread.
    pub fn make_current(&self) -> Result<Current> {
        make_current(self.context)
    }

    /// What is resident on it, for this call alone.
    pub fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses memory of a device that this one cannot read and write; its context must be current.
    pub fn check_peer(&self, ordinal: i32) -> Result<()> {
        if ordinal == self.ordinal {
            return Ok(());
        }
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if peers.contains(&ordinal) {
            return Ok(());
        }
        let peer = Self::get(ordinal)?;
        let mut can_access = 0;
        // SAFETY: the library is there; both are devices of this process.
        let answer = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can_access, self.handle, peer.handle) };
        check(answer, "asking for peer access")?;
        if can_access == 0 {
            return Err(Error::Layout(format!(
                "cuda:{} has no peer access to cuda:{ordinal}: copy through the host",
                self.ordinal
            )));
        }
        // SAFETY: as above; the peer's context lives as long as the process.
        match unsafe { sys::cuCtxEnablePeerAccess(peer.context, 0) } {
            CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {}
            answer => check(answer, "asking for peer access")?,
        }
        peers.push(ordinal);
        Ok(())
    }

    /// Blocks of the transposing kernel that run at once where each shares so many bytes.
    pub fn transposing_blocks(&self, shared_bytes: u64) -> Result<u64> {
        Ok(self.multiprocessors * blocks_at_once(self.transpose.function, shared_bytes)?)
    }
}

impl Kernel {
    /// Blocks that share `tiles` of work, or as many as run at once.
    pub fn blocks(&self, tiles: u64) -> u64 {
        tiles.min(self.resident_blocks)
    }

    /// Enqueues it, `parameters` being what its one parameter is.
    ///
    /// # Safety
    ///
    /// The parameters must be those that the kernel declares; the stream must exist; what the kernel reads
    /// and writes must be valid for that until it has run.
    pub unsafe fn launch<T>(
        self,
        blocks: u64,
        shared_bytes: u64,
        stream: Stream,
        parameters: &T,
    ) -> Result<()> {
        let mut pointers = [ptr::from_ref(parameters).cast_mut().cast::<c_void>()];
        let (blocks, shared_bytes) = (narrow(blocks), narrow(shared_bytes));
        // SAFETY: the caller guarantees parameters and stream; the driver copies the parameters.
        let answer = unsafe {
            sys::cuLaunchKernel(
                self.function,
                blocks,
                1,
                1,
                DEVICE_THREADS,
                1,
                1,
                shared_bytes,
                stream.handle(),
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check(answer, "launching a kernel")
    }
}

fn make_current(context: CUcontext) -> Result<Current> {
    // SAFETY: the library is there; the context is one that it gave out.
    check(unsafe { sys::cuCtxPushCurrent_v2(context) }, "switching to the device")?;
    Ok(Current)
}

fn attribute(device: CUdevice, attribute: Attribute) -> Result<u64> {
    let mut value = 0;
    // SAFETY: the library is there, the device open.
    let answer = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) };
    check(answer, "asking what the device has")?;
    Ok(u64::try_from(value).unwrap_or(0))
}

/// A device's compute capability, major and minor.
pub fn capability(device: CUdevice) -> Result<(u64, u64)> {
    let major = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    Ok((major, attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?))
}

/// A capability such as 8.0.
pub fn in_words((major, minor): (u64, u64)) -> String {
    format!("{major}.{minor}")
}

/// Loads the kernels into the current context.
fn load(ordinal: i32) -> Result<sys::CUmodule> {
    let image = KERNELS.map_err(|reason| Error::Layout(reason.to_owned()))?;
    let mut module = ptr::null_mut();
    // SAFETY: the library is there, a context current, and the image is one that nvcc made.
    let answer = unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) };
    match check(answer, &format!("loading kernels on cuda:{ordinal}")) {
        Err(Error::Transfer(why)) => Err(Error::Layout(why)), // it cannot run them, today or later
        loaded => loaded.map(|()| module),
    }
}

/// Blocks of a kernel that run at once on a multiprocessor, at least one.
fn blocks_at_once(function: CUfunction, shared_bytes: u64) -> Result<u64> {
    let mut blocks = 0;
    let threads = DEVICE_THREADS.cast_signed();
    let shared_bytes = usize::try_from(shared_bytes).unwrap_or(usize::MAX);
    // SAFETY: the library is there, the function found.
    let answer = unsafe {
        sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&raw mut blocks, function, threads, shared_bytes)
    };
    check(answer, "asking for occupancy")?;
    Ok(u64::try_from(blocks).unwrap_or(0).max(1))
}
