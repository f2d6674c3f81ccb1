//! Submissions: what one call has the kernels of a device do, with the tables that they read.

use kvferry_core::copies::repair::Repair;
use kvferry_core::memory::region::Region;
use kvferry_core::{Error, Result};

use crate::driver::check_available;
use crate::driver::device::{Current, Device, USUAL_SHARED_BYTES};
use crate::driver::memory;
use crate::driver::scratch::Scratch;
use crate::driver::stream::{Stream, Uncaptured};
use crate::job::{DEVICE_THREADS, Job};
use crate::matrices::{DEVICE_SCRATCH_BYTES, Matrices, through_device_memory};
use crate::records::{Record, Transpose, bytes};

/// Bytes at whose multiples each kind of record begins.
const ALIGNMENT: usize = 16;
/// Shortest pieces in which a matrix is written without waste: a sector of the device's memory.
const SECTOR_BYTES: u64 = 32;

/// One call's device, ready to be asked.
pub struct Submission {
    pub device: &'static Device,
    stream: Stream,
    pub is_captured: bool,
    _uncaptured: Option<Uncaptured>,
    _current: Current,
}

impl Submission {
    /// For a call on tensors in these regions.
    ///
    /// # Safety
    ///
    /// The stream must exist.
    pub unsafe fn begin<'a>(
        mut regions: impl Iterator<Item = &'a Region> + Clone,
        stream: Stream,
    ) -> Result<Self> {
        check_available()?;
        let mut ordinals = regions.clone().filter_map(memory::ordinal);
        let device = if stream.is_default() {
            let ordinal = ordinals.next().or_else(|| regions.find_map(memory::managed_ordinal));
            Device::get(ordinal.ok_or_else(|| {
                Error::Layout("no tensor lies on a device: a default stream could be that of any".to_owned())
            })?)?
        } else {
            // SAFETY: the caller guarantees the stream, which is no default one.
            let device = Device::of_context(unsafe { stream.context()? })?;
            let mut takes_part = None;
            let is_one = ordinals.any(|ordinal| *takes_part.insert(ordinal) == device.ordinal);
            if let (Some(other), false) = (takes_part, is_one) {
                return Err(Error::Value(format!(
                    "the stream belongs to cuda:{}, the tensors lie on cuda:{other}",
                    device.ordinal
                )));
            }
            device
        };
        let current = device.make_current()?;
        let uncaptured = Uncaptured::begin()?;
        // SAFETY: the caller guarantees the stream; its device's context is current.
        let is_captured = unsafe { stream.is_captured()? };
        Ok(Self { device, stream, is_captured, _uncaptured: uncaptured, _current: current })
    }

    /// Enqueues jobs, each behind the one before.
    ///
    /// # Safety
    ///
    /// Whatever the jobs read and write must be valid for that until the stream has passed.
    pub unsafe fn run(&self, jobs: &[Job]) -> Result<()> {
        if jobs.iter().all(|job| job.loop_tiles == 0 && job.run_tiles == 0) {
            return Ok(());
        }
        let size = |job: &Job| bytes(&job.table).len() + bytes(&job.loops).len() + bytes(&job.runs).len();
        let size = jobs.iter().map(|job| size(job) + 3 * ALIGNMENT).sum();
        let mut tables = Blob(Vec::with_capacity(size));
        // Entries come first: they tell one request's tables from the next one's.
        let placed: Vec<[u64; 3]> = jobs
            .iter()
            .map(|job| [tables.push(&job.table), tables.push(&job.loops), tables.push(&job.runs)])
            .collect();
        let launch = |address: u64| {
            let Device { copy_loops, copy_runs, .. } = self.device;
            for (job, [table, loops, runs]) in jobs.iter().zip(placed) {
                let of_loops = job.copy_loops(address + loops, address + table);
                let of_runs = job.copy_runs(address + runs);
                // SAFETY: the caller guarantees what is copied; the records are resident.
                unsafe {
                    if job.loop_tiles > 0 {
                        copy_loops.launch(copy_loops.blocks(job.loop_tiles), 0, self.stream, &of_loops)?;
                    }
                    if job.run_tiles > 0 {
                        copy_runs.launch(copy_runs.blocks(job.run_tiles), 0, self.stream, &of_runs)?;
                    }
                }
            }
            Ok(())
        };
        // SAFETY: the stream is this device's.
        unsafe { self.with_tables(&tables.0, launch) }
    }

    /// Enqueues the repair of rows whose tensor the device has at this address.
    ///
    /// # Safety
    ///
    /// The rows must be valid for reads and writes until the stream has passed.
    pub unsafe fn repair(&self, repair: &Repair, address: u64) -> Result<()> {
        // SAFETY: the caller guarantees the rows.
        unsafe {
            match in_shared_memory(repair, self.device.most_shared_bytes) {
                Some(matrices) => self.transpose(repair, &matrices, address),
                None => self.transpose_through_memory(repair, address),
            }
        }
    }

    /// # Safety
    ///
    /// As for [`Self::repair`]; `matrices` are its own, and fit in what a block can share.
    unsafe fn transpose(&self, repair: &Repair, matrices: &Matrices<'_>, address: u64) -> Result<()> {
        let mut tables = Blob::default();
        let rows = tables.push(&repair.rows);
        let transposition = tables.push(&[matrices.record(address)]);
        let shared_bytes = matrices.matrix_bytes();
        let blocks = self.device.transposing_blocks(shared_bytes)?.min(matrices.count());
        let launch = |address: u64| {
            let parameters = Transpose { transposition: address + transposition, rows: address + rows };
            // SAFETY: the caller guarantees the rows; the records are resident.
            unsafe { self.device.transpose.launch(blocks, shared_bytes, self.stream, &parameters) }
        };
        // SAFETY: the stream is this device's.
        unsafe { self.with_tables(&tables.0, launch) }
    }

    /// # Safety
    ///
    /// As for [`Self::repair`].
    unsafe fn transpose_through_memory(&self, repair: &Repair, address: u64) -> Result<()> {
        let matrices = through_device_memory(repair, DEVICE_SCRATCH_BYTES)?;
        if self.is_captured {
            return Err(Error::Value(format!(
                "{} has blocks too large to be repaired on a captured stream",
                repair.region.name
            )));
        }
        let scratch_bytes =
            DEVICE_SCRATCH_BYTES.min(matrices.matrix_bytes().saturating_mul(matrices.count()));
        // SAFETY: the stream is this device's.
        let scratch = unsafe { Scratch::new(scratch_bytes, self.stream)? };
        let jobs = matrices.batches(address, scratch.address, scratch_bytes, DEVICE_THREADS);
        let jobs = jobs.collect::<Result<Vec<[Job; 2]>>>()?;
        // All of them have their tables before the first runs, as a row must not be left half repaired.
        // SAFETY: the caller guarantees the rows; a batch fits in the scratch memory, which is freed behind it
        // on the same stream.
        unsafe { self.run(jobs.as_flattened()) }
    }

    /// # Safety
    ///
    /// The stream must belong to the device.
    unsafe fn with_tables(&self, bytes: &[u8], launch: impl FnOnce(u64) -> Result<()>) -> Result<()> {
        let mut tables = self.device.tables();
        // SAFETY: the caller guarantees the stream.
        unsafe {
            let resident = tables.resident(bytes, self.stream, self.is_captured)?;
            let launched = launch(resident.address);
            tables.release(resident, self.stream);
            launched
        }
    }
}

/// Matrices that fit where several blocks run beside one another, as long as they are not cut too finely for
/// that; else in all that a block can share.
fn in_shared_memory(repair: &Repair, most_shared_bytes: u64) -> Option<Matrices<'_>> {
    let is_coarse = |matrices: &Matrices<'_>| matrices.run_bytes() >= SECTOR_BYTES;
    let usual = Matrices::cut(repair, USUAL_SHARED_BYTES).filter(is_coarse);
    usual.or_else(|| Matrices::cut(repair, most_shared_bytes))
}

/// Records of several kinds, one after another.
#[derive(Default)]
struct Blob(Vec<u8>);

impl Blob {
    /// Adds records; where they begin.
    fn push<T: Record>(&mut self, records: &[T]) -> u64 {
        self.0.resize(self.0.len().next_multiple_of(ALIGNMENT), 0);
        let begin = self.0.len() as u64;
        self.0.extend_from_slice(bytes(records));
        begin
    }
}
