//! The host copier: executes bound schedules on host memory, on one thread or several.
//!
//! A schedule's loops become work that can be cut into equal parts anywhere; a kernel copies it, on the
//! threads of a pool where that pays. The result is the same for every kernel and any number of threads.
//!
//! This crate holds the only `unsafe` code that touches host memory. Everything that it relies on about
//! sizes is checked here again, for all loops, before the first byte moves.

pub mod fork;
mod kernel;
mod machine;
mod pool;
mod repair;
mod work;

use std::collections::HashMap;

use kvferry_core::memory::region::Region;
use kvferry_core::moves::overlap::BoundSchedule;
use kvferry_core::moves::strided::Strided;

use crate::kernel::Kernel;
pub use crate::kernel::{forced as forced_kernel, supported as supported_kernels};
pub use crate::pool::{MAX_THREADS, MIN_THREAD_BYTES, default_threads, set_default_threads};
pub use crate::repair::repair;
use crate::work::{Source, Work, cut};

/// Copies everything that the schedules move. At most `threads` threads take part, or
/// [`default_threads`] where `None`; small copies use fewer.
///
/// # Panics
///
/// If a loop reaches outside its tensors, before anything is written. Binding rules that out.
///
/// # Safety
///
/// Until this returns, every region must be host memory that is valid for reads, and the
/// targets' for writes by this call alone; [`kvferry_core::moves::overlap::check`] must have accepted the
/// schedules for one process.
pub unsafe fn copy(bound: &[BoundSchedule<'_>], threads: Option<usize>) {
    let total_bytes = bound.iter().map(|bound| bound.schedule.num_bytes()).sum();
    let kernel = kernel::choose(total_bytes);
    let work = works(bound, kernel);
    pool::run(&cut(work, pool::count(total_bytes, threads)), |part| {
        for work in part {
            // SAFETY: the caller guarantees the memory, in which each loop lies (`works`); parts name
            // different pieces, so that no two threads write one byte. `choose` knows the machine.
            unsafe { kernel.run(work) };
        }
    });
}

/// What distinguishes loops that may take turns: the target tensor, what is copied, and how many entries.
type Turn = (*const Region, Strided, usize);

/// The work of all loops. Loops that write the same way to the same entries of a tensor, as those from several
/// ranks do, are one.
fn works<'a>(bound: &[BoundSchedule<'a>], kernel: Kernel) -> Vec<Work<'a>> {
    let mut joined: Vec<(Strided, Vec<Source<'a>>, &'a [u64])> = Vec::new();
    let mut turns: HashMap<Turn, usize> = HashMap::new();
    for BoundSchedule { schedule, source, target } in bound {
        for copy in &schedule.loops {
            let (from, to) = (&source[copy.source_tensor], &target[copy.target_tensor]);
            let source_entries = &schedule.table.source[copy.entries.clone()];
            let target_entries = &schedule.table.target[copy.entries.clone()];
            let (source_span, target_span) = copy.strided.span_bytes();
            from.assert_reach(
                copy.source_offset,
                source_entries.iter().max().copied().or(Some(0)),
                source_span,
            );
            to.assert_reach(
                copy.target_offset,
                target_entries.iter().max().copied().or(Some(0)),
                target_span,
            );
            let source = Source {
                address: from.address + copy.source_offset,
                target: to.address + copy.target_offset,
                entries: source_entries.into(),
            };
            let turn = match bound {
                [_] => joined.len(), // one source has nobody to take turns with
                _ => *turns.entry((to, copy.strided, target_entries.len())).or_insert(joined.len()),
            };
            match joined.get_mut(turn) {
                Some((_, sources, entries)) if *entries == target_entries => sources.push(source),
                _ => joined.push((copy.strided, vec![source], target_entries)),
            }
        }
    }
    let work = |(strided, sources, entries): (Strided, Vec<Source<'a>>, &'a [u64])| {
        Work::new(&strided, sources, entries.into(), kernel.piece_bytes())
    };
    joined.into_iter().map(work).collect()
}
