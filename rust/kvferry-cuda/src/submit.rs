//! Submissions: what a call enqueues on its stream, after everything has been checked.

use std::slice;

use kvferry_core::copies::repair::Repair;
use kvferry_core::moves::overlap::BoundSchedule;
use kvferry_core::moves::schedule::CopyLoop;
use kvferry_core::moves::strided::each_step;
use kvferry_core::{Error, Result};

use crate::choose::{self, Direction, Thresholds, Way};
use crate::driver::check_available;
use crate::driver::device::{Current, Device, USUAL_SHARED_BYTES};
use crate::driver::engine::Pieces;
use crate::driver::memory::{Memory, Owner, Place, ordinal};
use crate::driver::scratch::Scratch;
use crate::driver::stream::{Stream, Uncaptured};
use crate::job::{DEVICE_THREADS, Job};
use crate::matrices::{DEVICE_SCRATCH_BYTES, Matrices, through_device_memory};
use crate::reach;
use crate::records::{CopyLoops, CopyRuns, Record, Transpose, bytes};

/// Bytes at whose multiples each kind of record begins.
const ALIGNMENT: usize = 16;
/// Shortest pieces in which a matrix is written without waste: a sector of the device's memory.
const SECTOR_BYTES: u64 = 32;

/// A schedule with the memory that it was bound to, and what the driver has said of that.
#[derive(Clone, Copy, Debug)]
pub struct Placed<'a> {
    /// What is moved, and between which tensors.
    pub bound: BoundSchedule<'a>,
    /// Of the source tensors.
    pub source: &'a Memory,
    /// Of the target tensors.
    pub target: &'a Memory,
}

/// Enqueues everything that the schedules move on `stream`, and returns. What ran on the stream before is
/// seen, what is enqueued later sees the copy; nothing else waits. An error has enqueued nothing, but for one
/// of the driver's.
///
/// Tensors lie on one device, or on two with access to one another, or in pinned host memory. The stream is
/// one of a device that takes part; a default stream is that of the target's device, or else of the source's.
///
/// A captured stream can repeat what was copied before by the same tensors, blocks and strides: what kernels
/// read besides the tensors is then on the device and stays there. Anything else is refused.
///
/// # Panics
///
/// If a loop reaches outside its tensors, before anything is enqueued. Binding rules that out.
///
/// # Safety
///
/// The stream must exist. Until it has passed what is enqueued, every region must be memory that is valid for
/// reads, and the targets' for writes by this call alone; [`kvferry_core::moves::overlap::check`] must have
/// accepted the schedules for one process.
pub unsafe fn copy(placed: &[Placed<'_>], stream: Stream) -> Result<()> {
    // SAFETY: the caller guarantees all that is asked for.
    unsafe { copy_by(placed, stream, Thresholds::current()?) }
}

/// As [`copy`], with thresholds that need not be the process's.
///
/// # Safety
///
/// As for [`copy`].
pub(crate) unsafe fn copy_by(placed: &[Placed<'_>], stream: Stream, thresholds: Thresholds) -> Result<()> {
    if placed.iter().all(|placed| placed.bound.schedule.num_bytes() == 0) {
        return Ok(());
    }
    for placed in placed {
        reach::check_loops(&placed.bound);
    }
    let ordinals = placed.iter().flat_map(|Placed { bound, .. }| {
        let ends = |copy: &CopyLoop| [&bound.target[copy.target_tensor], &bound.source[copy.source_tensor]];
        bound.schedule.loops.iter().flat_map(ends).filter_map(ordinal)
    });
    // SAFETY: the caller guarantees the stream.
    let on = unsafe { Submission::begin(ordinals, stream)? };
    let ends = placed.iter().flat_map(|placed| placed.ends(on.device)).collect::<Result<Vec<Ends>>>()?;
    let loops = || placed.iter().flat_map(|placed| &placed.bound.schedule.loops);
    let pieces: Vec<_> = loops().zip(&ends).map(|(copy, ends)| ends.pieces(copy)).collect();
    let ways = thresholds.choose(&pieces).ok_or_else(|| {
        Error::Layout("host memory that is pinned in several parts is not mapped for the device".to_owned())
    })?;

    let mut job = Job::new(DEVICE_THREADS);
    let mut chosen = ways.iter().zip(&ends);
    for Placed { bound, .. } in placed {
        job.push_schedule(bound.schedule, |_| {
            let (way, ends) = chosen.next().expect("one for each loop");
            Ok(ends.addresses().filter(|_| *way == Way::Kernel))
        })?;
    }
    // SAFETY: the caller guarantees stream and memory, in which every loop lies (`check_loops`).
    unsafe { on.run(&[job])? };

    let mut pieces = Pieces::new(stream, on.is_captured);
    let mut chosen = ways.iter().zip(&ends);
    for Placed { bound, .. } in placed {
        for (copy, (way, ends)) in bound.schedule.loops.iter().zip(&mut chosen) {
            if *way == Way::Engine {
                // SAFETY: as above.
                unsafe { push_pieces(&mut pieces, bound, copy, ends)? };
            }
        }
    }
    // SAFETY: as above.
    unsafe { pieces.enqueue() }
}

/// Enqueues the repair of every row on `stream`, as [`copy`]. Matrices that have to go through device memory
/// cannot be captured.
///
/// # Panics
///
/// If a row reaches outside its tensor, before anything is enqueued. [`Repair::new`] rules that out.
///
/// # Safety
///
/// The stream must exist. Until it has passed what is enqueued, the repair's region must be memory that is
/// valid for reads, and for writes by this call alone.
pub unsafe fn repair(repair: &Repair, stream: Stream) -> Result<()> {
    if repair.transposition.is_identity() || repair.rows.is_empty() {
        return Ok(());
    }
    repair.assert_inside();
    // SAFETY: the caller guarantees the stream.
    let on = unsafe { Submission::begin(ordinal(&repair.region).into_iter(), stream)? };
    let place = Memory::default().place(slice::from_ref(&repair.region), 0, on.device)?;
    let Some(address) = place.device_address else {
        return Err(Error::Layout(format!("{} is not mapped for the device", repair.region.name)));
    };
    // SAFETY: the caller guarantees stream and memory, in which every row lies (`assert_inside`).
    unsafe {
        match in_shared_memory(repair, on.device.most_shared_bytes) {
            Some(matrices) => on.transpose(repair, &matrices, address),
            None => on.transpose_through_memory(repair, address),
        }
    }
}

impl Placed<'_> {
    /// Where each loop's tensors are.
    fn ends(&self, device: &Device) -> impl Iterator<Item = Result<Ends>> {
        let Self { bound, source, target } = *self;
        bound.schedule.loops.iter().map(move |copy| {
            Ok(Ends {
                source: source.place(bound.source, copy.source_tensor, device)?,
                target: target.place(bound.target, copy.target_tensor, device)?,
            })
        })
    }
}

/// One call's device, ready to be asked.
struct Submission {
    device: &'static Device,
    stream: Stream,
    is_captured: bool,
    _uncaptured: Uncaptured,
    _current: Current,
}

impl Submission {
    /// # Safety
    ///
    /// The stream must exist.
    unsafe fn begin(mut ordinals: impl Iterator<Item = i32>, stream: Stream) -> Result<Self> {
        check_available()?;
        let device = if stream.is_default() {
            let ordinal = ordinals.next().ok_or_else(|| {
                Error::Layout("no tensor lies on a device: a default stream could be that of any".to_owned())
            })?;
            Device::get(ordinal)?
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
    unsafe fn run(&self, jobs: &[Job]) -> Result<()> {
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
                let of_loops = CopyLoops::new(job, address + loops, address + table);
                let of_runs = CopyRuns::new(job, address + runs);
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

    /// # Safety
    ///
    /// As for [`repair`]; `matrices` are its own, and fit in what a block can share.
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
    /// As for [`repair`].
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

/// Where a loop's tensors are.
#[derive(Clone, Copy, Debug)]
struct Ends {
    source: Place,
    target: Place,
}

impl Ends {
    /// The loop's pieces, and what can copy them.
    fn pieces(&self, copy: &CopyLoop) -> choose::Pieces {
        let is_host = |place: Place| place.owner == Owner::Host;
        choose::Pieces {
            direction: match (is_host(self.source), is_host(self.target)) {
                (false, false) => Direction::OnDevice,
                (true, false) => Direction::Upload,
                (false, true) => Direction::Download,
                (true, true) => Direction::OnHost,
            },
            num_bytes: copy.strided.run_bytes,
            count: copy.strided.runs().saturating_mul(copy.entries.len() as u64),
            can: [self.addresses().is_some(), self.source.is_whole && self.target.is_whole],
        }
    }

    /// The tensors' addresses for a kernel, where it can address both.
    fn addresses(&self) -> Option<(u64, u64)> {
        self.source.device_address.zip(self.target.device_address)
    }
}

/// # Safety
///
/// As for [`Pieces::push`].
unsafe fn push_pieces(
    pieces: &mut Pieces,
    bound: &BoundSchedule<'_>,
    copy: &CopyLoop,
    ends: &Ends,
) -> Result<()> {
    let table = &bound.schedule.table;
    let entries = table.source[copy.entries.clone()].iter().zip(&table.target[copy.entries.clone()]);
    pieces.begin_tensors();
    let mut pushed = Ok(());
    for (source_entry, target_entry) in entries {
        let source = ends.source.address + copy.source_offset + source_entry;
        let target = ends.target.address + copy.target_offset + target_entry;
        each_step(copy.strided.looping(), source, target, &mut |source, target| {
            if pushed.is_ok() {
                // SAFETY: the caller guarantees it.
                pushed = unsafe { pieces.push(source, target, copy.strided.run_bytes) };
            }
        });
        if pushed.is_err() {
            break;
        }
    }
    pushed
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
