//! Calls of the driver that fail, and what is left behind: one test, since the driver is the process's.

mod device;

use kvferry_core::copies::repair::{Fault, Repair};
use kvferry_core::copies::view::View;
use kvferry_core::memory::tensor::RawTensor;
use kvferry_cuda::Stream;
use kvferry_cuda::emulated::DRIVER;
use libloading::os::unix::{Library, RTLD_NOW};

use crate::device::{CPU, Case, allocate, blocks, bytes, copy, cuda, done, handle, on_device, stream, wait};

/// What the emulated driver can be asked, and no other.
struct Emulated(Library);

impl Emulated {
    fn get() -> Self {
        on_device(0);
        // SAFETY: it is loaded already.
        Self(unsafe { Library::open(Some(DRIVER), RTLD_NOW) }.unwrap())
    }

    /// Has the call fail that comes so many calls later, of those that can fail; 0: none.
    fn fail(&self, calls: u64) {
        // SAFETY: this is its signature.
        unsafe { self.0.get::<extern "C" fn(u64)>(b"kvferry_emulated_fail").unwrap()(calls) };
    }

    /// Whether the call that had to fail has.
    fn has_failed(&self) -> bool {
        // SAFETY: as above.
        unsafe { self.0.get::<extern "C" fn() -> bool>(b"kvferry_emulated_has_failed").unwrap()() }
    }

    /// Events that were ever made.
    fn events(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.0.get::<extern "C" fn() -> u64>(b"kvferry_emulated_events").unwrap()() }
    }

    /// Bytes of all memory that is allocated.
    fn bytes(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.0.get::<extern "C" fn() -> u64>(b"kvferry_emulated_bytes").unwrap()() }
    }
}

/// Copies by kernels of both kinds, uploads and downloads by both ways, in one call.
fn cases(seed: u64) -> Vec<Case> {
    let shapes = [
        (blocks(20 + seed, 2, 64), cuda(0), cuda(0)),
        (blocks(1 + seed % 2, 1, 48), cuda(1), cuda(0)),
        (blocks(30, 2, 256), CPU, cuda(0)),
        (blocks(2, 2, 40_000), cuda(0), CPU),
    ];
    shapes.map(|(shape, source, target)| Case::new(shape, source, target)).into()
}

fn run(cases: &[Case], on: Stream) -> kvferry_core::Result<()> {
    let bound: Vec<_> = cases.iter().map(Case::bound).collect();
    // SAFETY: the memory stays, and is this test's.
    unsafe { copy(&bound, on) }
}

/// Every call that can fail does, one after another: what it leaves is right once it is asked again, and
/// disturbs no copy before or after.
fn copies_survive_each_fault(driver: &Emulated) {
    let on = [stream(0), stream(0)];
    let (mut num_faults, mut events) = (0, 0);
    for fault in 1.. {
        let (before, failing, after) = (cases(1), cases(fault), cases(2));
        run(&before, on[1]).unwrap();
        driver.fail(fault);
        let result = run(&failing, on[0]);
        let is_over = !driver.has_failed();
        driver.fail(0);
        assert!(!is_over || result.is_ok());
        num_faults += u64::from(result.is_err());
        run(&after, on[0]).unwrap();
        for stream in on {
            done(wait(stream));
        }
        assert!(before.iter().chain(&after).all(Case::is_done), "fault {fault}: another call's copy");
        assert!(
            result.is_err() || failing.iter().all(Case::is_done),
            "fault {fault}: a copy that was no error"
        );
        run(&failing, on[1]).unwrap();
        done(wait(on[1]));
        assert!(failing.iter().all(Case::is_done), "fault {fault}: the same copy again");
        if is_over {
            break;
        }
        if fault == 5 {
            events = driver.events();
        }
    }
    assert!(num_faults > 10, "{num_faults} calls failed");
    // A table that stays for good keeps its own.
    assert!(driver.events() <= events + num_faults, "failed calls leave events");
}

/// A call that fails, or whose end cannot be recorded, has not run yet: whoever repeats it on another stream
/// does not find tables that are not on the device.
fn what_has_not_run_is_not_found(driver: &Emulated) {
    for fault in 1..10 {
        for round in 0..6 {
            let case = Case::new(blocks(20 + 10 * fault + round, 2, 64), cuda(0), cuda(0));
            let (failing, other) = (stream(0), stream(0));
            driver.fail(fault);
            let result = case.copy(failing);
            driver.fail(0);
            case.copy(other).unwrap();
            done(wait(other));
            assert!(case.is_done(), "fault {fault}: {result:?}");
            done(wait(failing));
        }
    }
}

/// A stream that lags with some small tables leaves room for the tables of another that does not.
fn few_tables_that_are_needed_do_not_use_up_all(driver: &Emulated) {
    let (late, on) = (stream(0), stream(0));
    // 16 bytes an entry: each table takes 1.6 MB, and a few of them go round a chunk.
    let mut case = Case::new(blocks(100_000, 1, 1), cuda(0), cuda(0));
    let small: Vec<Case> = (3..40).map(|n| Case::new(blocks(n, 1, 16), cuda(0), cuda(0))).collect();
    let mut memory = 0;
    for (round, small) in small.iter().flat_map(|small| [small; 3]).enumerate() {
        if round % 3 == 0 {
            small.copy(late).unwrap();
        }
        case.schedule.table.source.rotate_left(1);
        case.copy(on).unwrap();
        done(wait(on));
        assert!(case.is_done());
        if round == 20 {
            memory = driver.bytes();
        }
    }
    assert_eq!(driver.bytes(), memory);
    done(wait(late));
    assert!(small.iter().all(Case::is_done));
}

/// A repair in place through device memory is done, or left undone where a call fails.
fn repairs_are_done_or_not_begun(driver: &Emulated) {
    let (tokens, heads, row_bytes) = (8192, 8, 8192 * 8 * 2_i64);
    let num_bytes = u64::try_from(row_bytes).unwrap();
    let size = usize::try_from(num_bytes).unwrap();
    let address = allocate(num_bytes, cuda(0));
    let raw = RawTensor {
        address,
        shape: vec![1, tokens, heads, 1],
        strides: vec![row_bytes, heads * 2, 2, 2],
        item_bytes: 2,
        device: cuda(0),
        writable: true,
    };
    let repair = Repair::new(&View::new("rows", &raw).unwrap(), &[0], Fault::Layout).unwrap();
    let content: Vec<u8> = (0..size).map(|index| u8::try_from(index * 31 % 251).unwrap()).collect();
    let on = stream(0);
    let attempt = |fault: u64| {
        bytes(address, size).copy_from_slice(&content);
        driver.fail(fault);
        // SAFETY: the memory stays, and is this test's.
        let result = unsafe { kvferry_cuda::repair(&repair, on) };
        let is_over = !driver.has_failed();
        driver.fail(0);
        done(wait(on));
        (result, is_over, bytes(address, size).to_vec())
    };
    let (_, _, repaired) = attempt(0);
    assert!(repaired != content);
    for fault in 1.. {
        let (result, is_over, now) = attempt(fault);
        assert!(now == if result.is_ok() { &*repaired } else { &*content }, "fault {fault}: {result:?}");
        if is_over {
            assert!(fault > 5);
            break;
        }
    }
}

/// A call that is made again and again asks the driver for nothing that stays.
fn repeated_calls_leave_nothing(driver: &Emulated) {
    let (case, streams) = (Case::new(blocks(40, 2, 64), cuda(0), cuda(0)), [stream(0), stream(0)]);
    for on in streams {
        case.copy(on).unwrap();
    }
    let (events, memory) = (driver.events(), driver.bytes());
    for round in 0..1000 {
        case.copy(streams[round % 2]).unwrap(); // none of them has run
    }
    assert_eq!((driver.events(), driver.bytes()), (events, memory));
    for on in streams {
        done(wait(on));
    }
    // Streams that come and go are not confused, though the driver gives one the place of another.
    for _ in 0..100 {
        let on = stream(0);
        case.copy(on).unwrap();
        // SAFETY: the stream exists, and is this test's.
        done(unsafe { cudarc::driver::sys::cuStreamDestroy_v2(handle(on)) });
    }
    assert!(driver.events() <= events + 1);
    assert_eq!(driver.bytes(), memory);
}

/// However many different calls there are, their tables stay in what the first ones asked for.
fn different_calls_share_what_there_is(driver: &Emulated) {
    let (mut case, on) = (Case::new(blocks(40_000, 1, 16), cuda(0), cuda(0)), stream(0));
    let mut memory = 0;
    for round in 0..100 {
        case.schedule.table.source.rotate_left(1);
        case.copy(on).unwrap();
        done(wait(on));
        if round == 20 {
            memory = driver.bytes();
        }
    }
    assert_eq!(driver.bytes(), memory);
}

#[test]
#[cfg_attr(not(kernels), ignore = "this build has no kernels: there was no nvcc")]
fn whatever_fails_leaves_the_rest_right() {
    let driver = Emulated::get();
    repeated_calls_leave_nothing(&driver);
    different_calls_share_what_there_is(&driver);
    few_tables_that_are_needed_do_not_use_up_all(&driver);
    what_has_not_run_is_not_found(&driver);
    copies_survive_each_fault(&driver);
    repairs_are_done_or_not_begun(&driver);
}
