//! What a call enqueues on its stream, after everything has been checked.

use std::{iter, slice};

use kvferry_core::copies::repair::Repair;
use kvferry_core::moves::overlap::BoundSchedule;
use kvferry_core::moves::schedule::CopyLoop;
use kvferry_core::moves::strided::each_step;
use kvferry_core::{Error, Result};

use crate::choose::{Direction, Thresholds, Traffic, Way};
use crate::driver::check_available;
use crate::driver::device::Device;
use crate::driver::engine::Pieces;
use crate::driver::memory::{Memory, Owner, Place};
use crate::driver::stream::Stream;
use crate::job::{DEVICE_THREADS, Job};
use crate::reach;
use crate::submission::Submission;

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
/// On a captured stream, what kernels read besides the tensors stays on the device for good.
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
    if placed.iter().all(|placed| placed.bound.schedule.num_bytes() == 0) {
        return Ok(());
    }
    check_available()?;
    // SAFETY: the caller guarantees all that is asked for.
    unsafe { copy_by(placed, stream, Thresholds::current()?) }
}

/// As [`copy`], of something, with thresholds that need not be the process's.
///
/// # Safety
///
/// As for [`copy`].
pub(crate) unsafe fn copy_by(placed: &[Placed<'_>], stream: Stream, thresholds: Thresholds) -> Result<()> {
    for placed in placed {
        reach::check_loops(&placed.bound);
    }
    let loops: Vec<(&Placed<'_>, &CopyLoop)> = placed
        .iter()
        .flat_map(|placed| placed.bound.schedule.loops.iter().map(move |copy| (placed, copy)))
        .collect();
    let regions = loops.iter().flat_map(|(Placed { bound, .. }, copy)| {
        [&bound.target[copy.target_tensor], &bound.source[copy.source_tensor]]
    });
    // SAFETY: the caller guarantees the stream.
    let on = unsafe { Submission::begin(regions, stream)? };
    let ends = loops.iter().map(|(placed, copy)| placed.ends(copy, on.device));
    let ends = ends.collect::<Result<Vec<Ends>>>()?;
    let traffic: Vec<Traffic> = loops.iter().zip(&ends).map(|((_, copy), ends)| ends.traffic(copy)).collect();
    let ways = thresholds.choose(&traffic).map_err(|stuck| {
        let (Placed { bound, .. }, copy) = loops[stuck];
        let name = &bound.source[copy.source_tensor].name;
        Error::Layout(format!("{name} or its target is pinned in parts that the device does not see as one"))
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
    for ((Placed { bound, .. }, copy), (way, ends)) in loops.into_iter().zip(ways.iter().zip(&ends)) {
        if *way == Way::Engine {
            // SAFETY: as above.
            unsafe { push_pieces(&mut pieces, bound, copy, ends)? };
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
    let on = unsafe { Submission::begin(iter::once(&repair.region), stream)? };
    let place = Memory::default().place(slice::from_ref(&repair.region), 0, on.device)?;
    let Some(address) = place.device_address else {
        return Err(Error::Layout(format!("{} is not mapped for the device", repair.region.name)));
    };
    // SAFETY: the caller guarantees stream and memory, in which every row lies (`assert_inside`).
    unsafe { on.repair(repair, address) }
}

impl Placed<'_> {
    /// Where a loop's tensors are.
    fn ends(&self, copy: &CopyLoop, device: &Device) -> Result<Ends> {
        let Self { bound, source, target } = self;
        Ok(Ends {
            source: source.place(bound.source, copy.source_tensor, device)?,
            target: target.place(bound.target, copy.target_tensor, device)?,
        })
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
    fn traffic(&self, copy: &CopyLoop) -> Traffic {
        let is_host = |place: Place| place.owner == Owner::Host;
        Traffic {
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
