//! The emulated driver in the place of the real one, with memory, streams and copies on it.

use std::ffi::c_void;
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUcontext, CUresult, CUstream};
use kvferry_core::memory::region::Region;
use kvferry_core::memory::tensor::Device;
use kvferry_core::moves::overlap::BoundSchedule;
use kvferry_core::moves::schedule::{BlockTable, CopyLoop, Schedule};
use kvferry_core::moves::strided::{Dim, Strided};
use kvferry_cuda::emulated::DRIVER;
use kvferry_cuda::{Memory, Placed, Stream, available};
use libloading::os::unix::Library;

pub const CPU: Device = Device::CPU;

pub fn cuda(index: i32) -> Device {
    Device { kind: Device::CUDA, index }
}

/// Loads the emulated driver in place of any other, and makes a device's context current.
pub fn on_device(ordinal: i32) {
    static LOADED: OnceLock<()> = OnceLock::new();
    LOADED.get_or_init(|| {
        // SAFETY: its initializers set up its own variables.
        let driver = unsafe { Library::open(Some(DRIVER), libloading::os::unix::RTLD_NOW) }.unwrap();
        std::mem::forget(driver);
        available().unwrap();
    });
    let mut context: CUcontext = ptr::null_mut();
    // SAFETY: the driver is loaded, the device one of its.
    unsafe {
        done(sys::cuDevicePrimaryCtxRetain(&raw mut context, ordinal));
        done(sys::cuCtxPushCurrent_v2(context));
    }
}

pub fn done(result: CUresult) {
    assert_eq!(result, CUresult::CUDA_SUCCESS);
}

/// Memory of a device or pinned memory of the host, which stays until the process ends.
pub fn allocate(num_bytes: u64, device: Device) -> u64 {
    let (mut address, mut host): (u64, *mut c_void) = (0, ptr::null_mut());
    on_device(if device == CPU { 0 } else { device.index });
    let size = usize::try_from(num_bytes).unwrap();
    // SAFETY: a context is current.
    unsafe {
        if device == CPU {
            done(sys::cuMemHostAlloc(&raw mut host, size, 0));
            address = host.expose_provenance() as u64;
        } else {
            done(sys::cuMemAlloc_v2(&raw mut address, size));
        }
    }
    address
}

pub fn stream(device: i32) -> Stream {
    on_device(device);
    let mut stream: CUstream = ptr::null_mut();
    // SAFETY: a context is current.
    done(unsafe { sys::cuStreamCreate(&raw mut stream, 1) });
    Stream(stream.expose_provenance() as u64)
}

pub fn handle(stream: Stream) -> CUstream {
    ptr::with_exposed_provenance_mut(usize::try_from(stream.0).unwrap())
}

pub fn wait(stream: Stream) -> CUresult {
    // SAFETY: the stream exists.
    unsafe { sys::cuStreamSynchronize(handle(stream)) }
}

/// The bytes at an address of emulated memory, which is all the host's.
pub fn bytes(address: u64, num_bytes: usize) -> &'static mut [u8] {
    // SAFETY: tests allocate what they look at, and look when nothing runs.
    unsafe {
        std::slice::from_raw_parts_mut(
            ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap()),
            num_bytes,
        )
    }
}

pub fn region(address: u64, extent_bytes: u64, device: Device) -> Region {
    Region { name: "tensor \"t\"".to_owned(), address, extent_bytes, block_stride: 1, device, writable: true }
}

/// `blocks` blocks of `heads` runs, in reversed order.
pub fn blocks(blocks: u64, heads: u64, run_bytes: u64) -> (Schedule, u64) {
    let block_bytes = 2 * heads * run_bytes;
    let dim = Dim { count: heads, source_stride: 2 * run_bytes, target_stride: run_bytes };
    let source: Vec<u64> = (0..blocks).map(|block| block * block_bytes).collect();
    let table = BlockTable { target: source.iter().rev().copied().collect(), source };
    let (source_tensor, target_tensor, source_offset, target_offset) = (0, 0, 0, 0);
    let strided = Strided::new(run_bytes, [dim]).unwrap();
    let entries = 0..table.source.len();
    let copy = CopyLoop { source_tensor, target_tensor, source_offset, target_offset, strided, entries };
    (Schedule { loops: vec![copy], table }, blocks * block_bytes)
}

/// One schedule with its memory, and what should be in the target when it has run.
pub struct Case {
    pub schedule: Schedule,
    pub num_bytes: u64,
    pub source: [Region; 1],
    pub target: [Region; 1],
}

impl Case {
    pub fn new((schedule, num_bytes): (Schedule, u64), source: Device, target: Device) -> Self {
        let [source, target] =
            [source, target].map(|device| [region(allocate(num_bytes, device), num_bytes, device)]);
        let case = Self { schedule, num_bytes, source, target };
        case.refill(1);
        case
    }

    pub fn refill(&self, seed: u64) {
        let size = usize::try_from(self.num_bytes).unwrap();
        for (index, byte) in bytes(self.source[0].address, size).iter_mut().enumerate() {
            *byte = u8::try_from((index as u64 * 31 + (index as u64 >> 8) + seed) % 256).unwrap();
        }
        bytes(self.target[0].address, size).fill(0);
    }

    pub fn bound(&self) -> BoundSchedule<'_> {
        BoundSchedule { schedule: &self.schedule, source: &self.source, target: &self.target }
    }

    pub fn copy(&self, stream: Stream) -> kvferry_core::Result<()> {
        // SAFETY: the memory stays, and is this test's.
        unsafe { copy(&[self.bound()], stream) }
    }

    pub fn is_done(&self) -> bool {
        let size = usize::try_from(self.num_bytes).unwrap();
        let mut expected = vec![0; size];
        let copied = [region(expected.as_mut_ptr().expose_provenance() as u64, self.num_bytes, CPU)];
        let bound = BoundSchedule { schedule: &self.schedule, source: &self.source, target: &copied };
        // SAFETY: emulated memory is the host's.
        unsafe { kvferry_copy::copy(&[bound], Some(1)) };
        expected == bytes(self.target[0].address, size)
    }
}

/// Copies, with nothing known of any memory.
///
/// # Safety
///
/// As for [`kvferry_cuda::copy`].
pub unsafe fn copy(bound: &[BoundSchedule<'_>], stream: Stream) -> kvferry_core::Result<()> {
    let memory = Memory::default;
    let memories: Vec<[Memory; 2]> = bound.iter().map(|_| [memory(), memory()]).collect();
    let ends = bound.iter().zip(&memories);
    let placed: Vec<_> = ends.map(|(&bound, [source, target])| Placed { bound, source, target }).collect();
    // SAFETY: the caller guarantees all that is asked for.
    unsafe { kvferry_cuda::copy(&placed, stream) }
}
