//! Whole calls against an emulated driver, whose streams run only when they are waited for.

mod common;

use std::ffi::c_void;
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUcontext, CUresult, CUstream};
use kvferry_core::Error;
use kvferry_core::memory::region::Region;
use kvferry_core::memory::tensor::Device;
use kvferry_core::moves::overlap::BoundSchedule;
use kvferry_core::moves::schedule::{BlockTable, CopyLoop, Schedule};
use kvferry_core::moves::strided::{Dim, Strided};
use kvferry_cuda::emulated::DRIVER;
use kvferry_cuda::{Stream, available, check_memory};
use libloading::os::unix::Library;
use proptest::prelude::*;

use crate::common::{Copies, Ends, Memory, copies, rows};

const CPU: Device = Device::CPU;

fn cuda(index: i32) -> Device {
    Device { kind: 2, index }
}

/// Loads the emulated driver in place of any other, and makes a device's context current.
fn on_device(ordinal: i32) {
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

fn done(result: CUresult) {
    assert_eq!(result, CUresult::CUDA_SUCCESS);
}

/// Memory of a device or pinned memory of the host, which stays until the process ends.
fn allocate(num_bytes: u64, device: Device) -> u64 {
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

fn stream(device: i32) -> Stream {
    on_device(device);
    let mut stream: CUstream = ptr::null_mut();
    // SAFETY: a context is current.
    done(unsafe { sys::cuStreamCreate(&raw mut stream, 1) });
    Stream(stream.expose_provenance() as u64)
}

fn handle(stream: Stream) -> CUstream {
    ptr::with_exposed_provenance_mut(usize::try_from(stream.0).unwrap())
}

fn wait(stream: Stream) -> CUresult {
    // SAFETY: the stream exists.
    unsafe { sys::cuStreamSynchronize(handle(stream)) }
}

/// The bytes at an address of emulated memory, which is all the host's.
fn bytes(address: u64, num_bytes: usize) -> &'static mut [u8] {
    // SAFETY: tests allocate what they look at, and look when nothing runs.
    unsafe {
        std::slice::from_raw_parts_mut(
            ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap()),
            num_bytes,
        )
    }
}

fn region(address: u64, extent_bytes: u64, device: Device) -> Region {
    Region { name: "tensor \"t\"".to_owned(), address, extent_bytes, block_stride: 1, device, writable: true }
}

/// `blocks` blocks of `heads` runs, in reversed order.
fn blocks(blocks: u64, heads: u64, run_bytes: u64) -> (Schedule, u64) {
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
struct Case {
    schedule: Schedule,
    num_bytes: u64,
    source: [Region; 1],
    target: [Region; 1],
}

impl Case {
    fn new((schedule, num_bytes): (Schedule, u64), source: Device, target: Device) -> Self {
        let [source, target] =
            [source, target].map(|device| [region(allocate(num_bytes, device), num_bytes, device)]);
        let case = Self { schedule, num_bytes, source, target };
        case.refill(1);
        case
    }

    fn refill(&self, seed: u64) {
        let size = usize::try_from(self.num_bytes).unwrap();
        for (index, byte) in bytes(self.source[0].address, size).iter_mut().enumerate() {
            *byte = u8::try_from((index as u64 * 31 + (index as u64 >> 8) + seed) % 256).unwrap();
        }
        bytes(self.target[0].address, size).fill(0);
    }

    fn copy(&self, stream: Stream) -> kvferry_core::Result<()> {
        let bound = BoundSchedule { schedule: &self.schedule, source: &self.source, target: &self.target };
        // SAFETY: the memory stays, and is this test's.
        unsafe { kvferry_cuda::copy(&[bound], stream) }
    }

    fn is_done(&self) -> bool {
        let size = usize::try_from(self.num_bytes).unwrap();
        let mut expected = vec![0; size];
        let copied = [region(expected.as_mut_ptr().expose_provenance() as u64, self.num_bytes, CPU)];
        let bound = BoundSchedule { schedule: &self.schedule, source: &self.source, target: &copied };
        // SAFETY: emulated memory is the host's.
        unsafe { kvferry_copy::copy(&[bound], Some(1)) };
        expected == bytes(self.target[0].address, size)
    }
}

fn message(result: kvferry_core::Result<()>) -> String {
    result.unwrap_err().to_string()
}

#[test]
#[cfg_attr(not(kernels), ignore = "this build has no kernels: there was no nvcc")]
fn a_copy_runs_in_the_streams_order_and_not_before() {
    for (source, target) in [(cuda(0), cuda(0)), (CPU, cuda(0)), (cuda(0), CPU), (cuda(1), cuda(0))] {
        // Small and many for kernels, large and few for the copy engine.
        for shape in [(40, 4, 256), (3, 2, 40_000)] {
            let (case, on) = (Case::new(blocks(shape.0, shape.1, shape.2), source, target), stream(0));
            case.copy(on).unwrap();
            assert!(!case.is_done(), "{source} to {target} did not wait for its stream");
            done(wait(on));
            assert!(case.is_done(), "{source} to {target} of {shape:?}");
        }
    }
}

#[test]
#[cfg_attr(not(kernels), ignore = "this build has no kernels: there was no nvcc")]
fn default_streams_are_those_of_the_tensors_device() {
    for device in [0, 1] {
        let case = Case::new(blocks(3, 2, 40_000), CPU, cuda(device));
        case.copy(Stream(0)).unwrap();
        on_device(device);
        done(wait(Stream(0)));
        assert!(case.is_done());
    }
    let on_host = Case::new(blocks(3, 2, 4), CPU, CPU);
    assert!(message(on_host.copy(Stream(0))).contains("no tensor lies on a device"));
}

#[test]
#[cfg_attr(not(kernels), ignore = "this build has no kernels: there was no nvcc")]
fn many_copies_in_flight_keep_their_tables_apart() {
    let streams = [stream(0), stream(0)];
    let cases: Vec<Case> = (1..60).map(|n| Case::new(blocks(n, 3, 48), cuda(0), cuda(0))).collect();
    for (index, case) in cases.iter().enumerate() {
        case.copy(streams[index % 2]).unwrap();
    }
    for (index, case) in cases.iter().enumerate() {
        case.copy(streams[(index + 1) % 2]).unwrap(); // waits for the other stream's upload
    }
    done(wait(streams[1]));
    assert!(cases.iter().all(Case::is_done)); // by this stream's turn alone
    for case in &cases {
        case.refill(2);
    }
    done(wait(streams[0]));
    assert!(cases.iter().skip(1).step_by(2).all(Case::is_done));
}

/// Copies with so many different tables, one after another, that no idle one stays.
fn replace_tables(on: Stream) {
    // 16 bytes an entry: each table takes 1 MiB, of which 32 may stay idle.
    let mut case = Case::new(blocks(40_000, 1, 16), cuda(0), cuda(0));
    for round in 0..40 {
        case.schedule.table.source.rotate_left(1);
        case.copy(on).unwrap();
        if round % 3 == 0 {
            done(wait(on));
            assert!(case.is_done(), "round {round}");
        }
    }
    done(wait(on));
}

#[test]
#[cfg_attr(not(kernels), ignore = "this build has no kernels: there was no nvcc")]
fn tables_are_given_up_when_no_stream_needs_them() {
    let (case, streams) = (Case::new(blocks(40_000, 1, 32), cuda(0), cuda(0)), [stream(0), stream(0)]);
    case.copy(streams[0]).unwrap();
    done(wait(streams[0]));
    case.refill(2);
    case.copy(streams[1]).unwrap();
    replace_tables(streams[0]);
    assert!(!case.is_done());
    done(wait(streams[1]));
    assert!(case.is_done());
}

#[test]
#[cfg_attr(not(kernels), ignore = "this build has no kernels: there was no nvcc")]
fn a_graph_repeats_what_is_resident() {
    let (case, other, on) = (
        Case::new(blocks(40_000, 1, 32), cuda(0), cuda(0)), // with a table as large as those that replace it
        Case::new(blocks(41, 4, 256), cuda(0), cuda(0)),
        stream(0),
    );
    case.copy(on).unwrap();
    // SAFETY: the stream exists; graphs are instantiated and launched as they were captured.
    unsafe {
        done(sys::cuStreamBeginCapture_v2(
            handle(on),
            sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        ));
        assert!(message(case.copy(on)).contains("has not run yet"));
        let mut graph = ptr::null_mut();
        done(sys::cuStreamEndCapture(handle(on), &raw mut graph));

        done(wait(on));
        case.refill(7);
        done(sys::cuStreamBeginCapture_v2(
            handle(on),
            sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        ));
        case.copy(on).unwrap();
        assert!(message(other.copy(on)).contains("once before the capture"));
        done(sys::cuStreamEndCapture(handle(on), &raw mut graph));
        assert!(!case.is_done());

        let mut executable = ptr::null_mut();
        done(sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0));
        replace_tables(on);
        for seed in [8, 9] {
            case.refill(seed);
            done(sys::cuGraphLaunch(executable, handle(on)));
            done(wait(on));
            assert!(case.is_done());
        }
    }
}

#[test]
#[cfg_attr(not(kernels), ignore = "this build has no kernels: there was no nvcc")]
fn wrong_devices_streams_and_memory_are_refused_by_name() {
    let shape = || blocks(20, 2, 64);
    assert_eq!(
        message(Case::new(shape(), cuda(2), cuda(0)).copy(stream(0))),
        "cuda:0 has no peer access to cuda:2: copy through the host"
    );
    assert_eq!(
        message(Case::new(shape(), cuda(0), cuda(0)).copy(stream(2))),
        "the stream belongs to cuda:2, the tensors lie on cuda:0"
    );
    let mut case = Case::new(shape(), cuda(0), cuda(0));
    case.source[0].device = cuda(7);
    assert_eq!(message(case.copy(stream(0))), "device cuda:7 is none of the 3 devices here");
    case.source[0].device = Device { kind: 10, index: 0 };
    assert!(message(case.copy(stream(0))).contains("which CUDA cannot copy"));
    let mut pageable = vec![0_u8; 1 << 20];
    case.source[0].device = CPU;
    case.source[0].address = pageable.as_mut_ptr().expose_provenance() as u64;
    assert!(message(case.copy(stream(0))).contains("not pinned"));

    let here = region(allocate(100, cuda(0)), 100, cuda(0));
    check_memory(&here).unwrap();
    let elsewhere = Region { device: cuda(1), ..here.clone() };
    assert!(message(check_memory(&elsewhere)).contains("said to lie on cuda:1, but lies on cuda:0"));
    assert!(matches!(check_memory(&Region { device: cuda(-1), ..here }), Err(Error::Layout(_))));
}

#[test]
#[cfg_attr(not(kernels), ignore = "this build has no kernels: there was no nvcc")]
fn an_empty_copy_asks_for_nothing() {
    // SAFETY: nothing is copied.
    unsafe { kvferry_cuda::copy(&[], Stream(0)) }.unwrap();
}

#[test]
#[cfg_attr(not(kernels), ignore = "this build has no kernels: there was no nvcc")]
fn matrices_that_fit_nowhere_else_go_through_device_memory() {
    use kvferry_core::copies::repair::{Fault, Repair};
    use kvferry_core::copies::view::View;
    use kvferry_core::memory::tensor::RawTensor;

    // 64 Ki items of two bytes do not fit in 99 KiB.
    let (tokens, heads, row_bytes) = (8192, 8, 8192 * 8 * 2 * 2_i64);
    let shape = vec![3, tokens, heads, 2];
    let strides = vec![row_bytes, heads * 4, 4, 2];
    let num_bytes = 3 * row_bytes.unsigned_abs();
    let mut host = Memory::new(num_bytes, 1);
    let address = allocate(num_bytes, cuda(0));
    let size = usize::try_from(num_bytes).unwrap();
    bytes(address, size).copy_from_slice(bytes(host.address(), size));
    let repair = |address: u64, device: Device| {
        let (shape, strides) = (shape.clone(), strides.clone());
        let raw = RawTensor { address, shape, strides, item_bytes: 2, device, writable: true };
        Repair::new(&View::new("rows", &raw).unwrap(), &[2, 0], Fault::Layout).unwrap()
    };
    let on = stream(0);
    // SAFETY: both memories are this test's.
    unsafe {
        kvferry_copy::repair(&repair(host.address(), CPU), Some(1));
        kvferry_cuda::repair(&repair(address, cuda(0)), on).unwrap();
    }
    done(wait(on));
    assert!(bytes(address, size) == bytes(host.address(), size));
}

fn regions(copies: &Copies, at: (u64, u64), devices: (Device, Device)) -> Ends {
    let (mut source, mut target) = copies.regions(at.0, at.1);
    for region in &mut source {
        region.device = devices.0;
    }
    for region in &mut target {
        region.device = devices.1;
    }
    (source, target)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    #[cfg_attr(not(kernels), ignore = "this build has no kernels: there was no nvcc")]
    fn calls_copy_what_the_host_copies(copies in copies(), from_host in any::<bool>(), to_host in any::<bool>()) {
        let devices = if from_host { (CPU, cuda(0)) } else if to_host { (cuda(0), CPU) } else { (cuda(0), cuda(0)) };
        let (mut source, mut target) = (Memory::new(copies.source_bytes, 1), Memory::new(copies.target_bytes, 2));
        let sizes = [copies.source_bytes, copies.target_bytes].map(|size| usize::try_from(size).unwrap());
        let at = (allocate(copies.source_bytes, devices.0), allocate(copies.target_bytes, devices.1));
        bytes(at.0, sizes[0]).copy_from_slice(bytes(source.address(), sizes[0]));
        bytes(at.1, sizes[1]).copy_from_slice(bytes(target.address(), sizes[1]));
        let on_host = regions(&copies, (source.address(), target.address()), (CPU, CPU));
        let on_device = regions(&copies, at, devices);
        let on = stream(0);
        // SAFETY: the memories hold the tensors and are this test's alone.
        unsafe {
            kvferry_copy::copy(&copies.bound(&on_host), Some(1));
            kvferry_cuda::copy(&copies.bound(&on_device), on).unwrap();
        }
        prop_assert_eq!(wait(on), CUresult::CUDA_SUCCESS);
        prop_assert!(bytes(at.0, sizes[0]) == bytes(source.address(), sizes[0]));
        prop_assert!(bytes(at.1, sizes[1]) == bytes(target.address(), sizes[1]));
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "this build has no kernels: there was no nvcc")]
    fn calls_repair_what_the_host_repairs(rows in rows()) {
        let mut host = Memory::new(rows.num_bytes, 1);
        let size = usize::try_from(rows.num_bytes).unwrap();
        let address = allocate(rows.num_bytes, cuda(0));
        bytes(address, size).copy_from_slice(bytes(host.address(), size));
        let mut on_device = rows.repair(address);
        on_device.region.device = cuda(0);
        let on = stream(0);
        // SAFETY: the memories hold the rows and are this test's alone.
        unsafe {
            kvferry_copy::repair(&rows.repair(host.address()), Some(1));
            kvferry_cuda::repair(&on_device, on).unwrap();
        }
        prop_assert_eq!(wait(on), CUresult::CUDA_SUCCESS);
        prop_assert!(bytes(address, size) == bytes(host.address(), size));
    }
}
