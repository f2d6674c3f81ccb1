//! Whole calls against an emulated driver, whose streams run only when they are waited for.

mod common;
mod device;

use std::ptr;

use cudarc::driver::sys::{self, CUresult};
use kvferry_core::Error;
use kvferry_core::memory::tensor::Device;
use kvferry_core::moves::schedule::CopyLoop;
use kvferry_core::moves::strided::Strided;
use kvferry_cuda::Stream;
use proptest::prelude::*;

use crate::common::{Copies, Ends, Memory, copies, rows};
use crate::device::{CPU, Case, allocate, blocks, bytes, copy, cuda, done, handle, on_device, stream, wait};

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
fn a_graph_repeats_copies_that_were_made_before_and_others() {
    // With tables as large as those that replace them.
    let [before, never, on] = [(), (), ()].map(|()| Case::new(blocks(40_000, 1, 32), cuda(0), cuda(0)));
    let stream = stream(0);
    let mut graph = ptr::null_mut();
    let capture = |calls: &[&Case]| {
        let mut captured = ptr::null_mut();
        // SAFETY: the stream exists.
        unsafe {
            done(sys::cuStreamBeginCapture_v2(
                handle(stream),
                sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            ));
            for case in calls {
                case.copy(stream).unwrap();
            }
            done(sys::cuStreamEndCapture(handle(stream), &raw mut captured));
        }
        captured
    };
    before.copy(stream).unwrap();
    done(wait(stream));
    on.copy(stream).unwrap(); // has not run when it is captured
    let captured = capture(&[&before, &never, &on]);
    never.copy(stream).unwrap(); // what the graph brings along is not on the device yet
    done(wait(stream));
    assert!(never.is_done() && on.is_done());
    // SAFETY: the graph was captured just now.
    done(unsafe { sys::cuGraphInstantiateWithFlags(&raw mut graph, captured, 0) });
    replace_tables(stream);
    for seed in [8, 9] {
        for case in [&before, &never, &on] {
            case.refill(seed);
        }
        // SAFETY: the graph and the stream exist.
        done(unsafe { sys::cuGraphLaunch(graph, handle(stream)) });
        done(wait(stream));
        assert!([&before, &never, &on].iter().all(|case| case.is_done()));
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
    assert_eq!(message(case.copy(stream(0))), "tensor \"t\" is said to lie on cuda:7, but lies on cuda:0");
    case.target[0].device = cuda(7);
    assert_eq!(message(case.copy(Stream(0))), "device cuda:7 is none of the 3 devices here");
    case.target[0].device = cuda(0);
    case.source[0].device = Device { kind: 10, index: 0 };
    assert!(message(case.copy(stream(0))).contains("which CUDA cannot copy"));
    let mut pageable = vec![0_u8; 1 << 20];
    case.source[0].device = CPU;
    case.source[0].address = pageable.as_mut_ptr().expose_provenance() as u64;
    assert!(message(case.copy(stream(0))).contains("not pinned"));

    let mut case = Case::new(shape(), cuda(0), cuda(0));
    case.source[0].device = cuda(1);
    assert_eq!(message(case.copy(stream(0))), "tensor \"t\" is said to lie on cuda:1, but lies on cuda:0");
    let mut case = Case::new(shape(), CPU, cuda(0));
    case.source[0].device = cuda(0);
    assert!(message(case.copy(stream(0))).contains("said to lie on cuda:0, but is no memory of a device"));
    case.source[0].device = cuda(-1);
    assert!(matches!(case.copy(stream(0)), Err(Error::Layout(_))));
}

#[test]
#[cfg_attr(not(kernels), ignore = "this build has no kernels: there was no nvcc")]
fn pools_of_another_device_need_its_access() {
    let mut case = Case::new(blocks(20, 2, 64), cuda(1), cuda(0));
    case.copy(stream(0)).unwrap(); // contexts have access to each other from here on
    let mut address = 0;
    on_device(1);
    let size = usize::try_from(case.num_bytes).unwrap();
    // SAFETY: a context is current.
    done(unsafe { sys::cuMemAllocAsync(&raw mut address, size, ptr::null_mut()) });
    case.source[0].address = address;
    assert!(
        message(case.copy(stream(0))).contains("in a pool or a mapping to which cuda:0 was given no access")
    );
    case.refill(3);
    let on = stream(1);
    case.copy(on).unwrap();
    done(wait(on));
    assert!(case.is_done());
}

#[test]
#[cfg_attr(not(kernels), ignore = "this build has no kernels: there was no nvcc")]
fn host_memory_may_be_pinned_in_several_parts_and_in_all_of_them() {
    // Pieces so large that the copy engine would have them, one of which lies in both parts.
    let mut case = Case::new(blocks(3, 2, 40_000), CPU, cuda(0));
    let size = usize::try_from(case.num_bytes).unwrap();
    let memory = Box::leak(vec![0_u8; size].into_boxed_slice());
    let (first, second) = memory.split_at_mut(size / 2);
    let pin = |part: &mut [u8]| {
        // SAFETY: the memory stays until the process ends.
        done(unsafe { sys::cuMemHostRegister_v2(part.as_mut_ptr().cast(), part.len(), 0) });
    };
    let pinned =
        std::mem::replace(&mut case.source[0].address, first.as_mut_ptr().expose_provenance() as u64);
    bytes(case.source[0].address, size).copy_from_slice(bytes(pinned, size));
    let on = stream(0);
    pin(first);
    assert!(message(case.copy(on)).contains("not pinned"));
    pin(second);
    case.copy(on).unwrap();
    done(wait(on));
    assert!(case.is_done());
}

#[test]
#[cfg_attr(not(kernels), ignore = "this build has no kernels: there was no nvcc")]
fn a_call_may_have_more_pieces_than_the_copy_engine_should_take() {
    for (source, target) in [(CPU, cuda(0)), (cuda(0), CPU)] {
        let (mut case, on) = (Case::new(blocks(70_000, 1, 256), source, target), stream(0));
        let copy = case.schedule.loops.pop().unwrap();
        // 16 loops of 70,000 pieces each are more than 2^20.
        case.schedule.loops = (0..16)
            .map(|part| CopyLoop {
                source_offset: copy.source_offset + part * 16,
                target_offset: copy.target_offset + part * 16,
                strided: Strided::new(16, []).unwrap(),
                ..copy.clone()
            })
            .collect();
        case.copy(on).unwrap();
        done(wait(on));
        assert!(case.is_done(), "{source} to {target}");
    }
}

#[test]
#[cfg_attr(not(kernels), ignore = "this build has no kernels: there was no nvcc")]
fn what_stays_on_the_host_beside_a_copy_does_not_wait() {
    let (device, host, on) = (
        Case::new(blocks(20, 2, 64), cuda(0), cuda(0)),
        Case::new(blocks(3, 2, 40_000), CPU, CPU),
        stream(0),
    );
    let bound = [&device, &host].map(Case::bound);
    // SAFETY: the memory stays, and is this test's.
    unsafe { copy(&bound, on) }.unwrap();
    assert!(!device.is_done() && !host.is_done());
    done(wait(on));
    assert!(device.is_done() && host.is_done());
}

#[test]
#[cfg_attr(not(kernels), ignore = "this build has no kernels: there was no nvcc")]
fn an_empty_copy_asks_for_nothing() {
    // SAFETY: nothing is copied.
    unsafe { copy(&[], Stream(0)) }.unwrap();
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

/// Calls and waits: which copy on which stream, and a stream that is waited for afterwards.
fn calls() -> impl Strategy<Value = Vec<(usize, usize, Option<usize>)>> {
    let wait = prop_oneof![3 => Just(None), 1 => (0_usize..3).prop_map(Some)];
    prop::collection::vec((0_usize..12, 0_usize..3, wait), 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    #[cfg_attr(not(kernels), ignore = "this build has no kernels: there was no nvcc")]
    fn tables_are_those_of_their_calls_whatever_comes_before_and_after(calls in calls()) {
        let streams = [(); 3].map(|()| stream(0));
        // Their tables take from a page to 1.3 MB, and go round the first chunk within some calls.
        let cases: Vec<Case> = (0..12)
            .map(|n| Case::new(blocks(if n < 4 { 20 + n } else { 10_000 * (n - 3) }, 1, 16), cuda(0), cuda(0)))
            .collect();
        let mut on: Vec<[bool; 3]> = vec![[false; 3]; cases.len()];
        let last = (0..3).map(|stream| (0, stream, Some(stream)));
        for (seed, (copied, stream, waited)) in calls.into_iter().chain(last).enumerate() {
            cases[copied].copy(streams[stream]).unwrap();
            on[copied][stream] = true;
            let Some(waited) = waited else { continue };
            prop_assert_eq!(wait(streams[waited]), CUresult::CUDA_SUCCESS);
            for (case, on) in cases.iter().zip(&mut on).filter(|(_, on)| on[waited]) {
                prop_assert!(case.is_done());
                on[waited] = false;
                if *on == [false; 3] {
                    case.refill(seed as u64); // so that the next copy shows
                }
            }
        }
    }
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
            copy(&copies.bound(&on_device), on).unwrap();
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
