//! The emulated device: the kernels' own source, compiled for the host and run on host memory.
//!
//! Threads of a block, and blocks of a grid, run one after another. What is encoded, tiled and cut for a
//! device is so here, except for the driver.

use kvferry_core::Result;
use kvferry_core::copies::repair::Repair;
use kvferry_core::moves::overlap::BoundSchedule;

use crate::job::{DEVICE_THREADS, Job};
use crate::matrices::{Matrices, through_device_memory};
use crate::reach;
use crate::records::{CopyLoops, CopyRuns, Transpose};

/// A library that takes the driver's place where it is loaded first: devices 0 and 1 with access to each
/// other, and device 2, whose memory is the host's.
pub const DRIVER: &str = env!("KVFERRY_EMULATED_DRIVER");

/// In what order an emulated grid runs.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Order {
    blocks: u32,
    threads: u32,
    is_backward: u32,
}

impl Order {
    /// Threads of a small block: no power of two, so that no index divides evenly.
    const FEW_THREADS: u32 = 7;

    /// A grid of so many blocks, each as a device has them or of a few threads, first to last or last to
    /// first.
    pub fn new(blocks: u32, is_small: bool, is_backward: bool) -> Self {
        let threads = if is_small { Self::FEW_THREADS } else { DEVICE_THREADS };
        Self { blocks, threads, is_backward: u32::from(is_backward) }
    }
}

/// What an emulated device has for a matrix.
#[derive(Clone, Copy, Debug)]
pub struct Scratch {
    /// Bytes that a block shares.
    pub shared_bytes: u64,
    /// Bytes of memory, for matrices that do not fit in those.
    pub device_bytes: u64,
}

unsafe extern "C" {
    fn kvferry_emulated_copy_loops(copy: *const CopyLoops, order: *const Order) -> u64;
    fn kvferry_emulated_copy_runs(copy: *const CopyRuns, order: *const Order) -> u64;
    fn kvferry_emulated_transpose(transpose: *const Transpose, order: *const Order) -> u64;
}

/// Copies everything that the schedules move, as [`crate::copy`] by kernels alone.
///
/// # Panics
///
/// If a kernel reads or writes a vector at an address that is not a multiple of its bytes.
///
/// # Safety
///
/// As for `kvferry_copy::copy`.
pub unsafe fn copy(bound: &[BoundSchedule<'_>], order: Order) -> Result<()> {
    let mut job = Job::new(order.threads);
    for bound in bound {
        reach::check_loops(bound);
        let BoundSchedule { schedule, source, target } = bound;
        job.push_schedule(schedule, |copy| {
            Ok(Some((source[copy.source_tensor].address, target[copy.target_tensor].address)))
        })?;
    }
    // SAFETY: the caller guarantees the memory, in which every loop lies.
    unsafe { run(&job, order) };
    Ok(())
}

/// Repairs every row, as [`crate::repair`].
///
/// # Panics
///
/// As for [`copy`].
///
/// # Safety
///
/// As for `kvferry_copy::repair`.
pub unsafe fn repair(repair: &Repair, order: Order, scratch: Scratch) -> Result<()> {
    if repair.transposition.is_identity() || repair.rows.is_empty() {
        return Ok(());
    }
    repair.assert_inside();
    let address = repair.region.address;
    if let Some(matrices) = Matrices::cut(repair, scratch.shared_bytes) {
        let record = [matrices.record(address)];
        let (transposition, rows) = (address_of(&record), address_of(&repair.rows));
        let transpose = Transpose { transposition, rows };
        // SAFETY: the caller guarantees the memory, in which every row lies; the records outlive the call.
        let misaligned = unsafe { kvferry_emulated_transpose(&raw const transpose, &raw const order) };
        assert_eq!(misaligned, 0, "vectors at addresses that are no multiples of their bytes");
        return Ok(());
    }
    let matrices = through_device_memory(repair, scratch.device_bytes)?;
    let memory = vec![0_u128; usize::try_from(scratch.device_bytes / 16 + 1).expect("bytes of memory")];
    let jobs = matrices.batches(address, address_of(&memory), scratch.device_bytes, order.threads);
    for jobs in jobs.collect::<Result<Vec<_>>>()? {
        for job in &jobs {
            // SAFETY: as above; a batch fits in `memory`.
            unsafe { run(job, order) };
        }
    }
    Ok(())
}

/// # Safety
///
/// Whatever the job reads and writes must be valid for that.
unsafe fn run(job: &Job, order: Order) {
    let loops = job.copy_loops(address_of(&job.loops), address_of(&job.table));
    let runs = job.copy_runs(address_of(&job.runs));
    // SAFETY: the caller guarantees what is copied; the records outlive the calls.
    let misaligned = unsafe {
        kvferry_emulated_copy_loops(&raw const loops, &raw const order)
            + kvferry_emulated_copy_runs(&raw const runs, &raw const order)
    };
    assert_eq!(misaligned, 0, "vectors at addresses that are no multiples of their bytes");
}

fn address_of<T>(records: &[T]) -> u64 {
    records.as_ptr().expose_provenance() as u64
}
