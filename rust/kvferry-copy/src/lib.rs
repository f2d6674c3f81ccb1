//! The host copier: executes bound schedules on host memory, on one thread or several.
//!
//! This crate holds the only `unsafe` code that touches host memory. Everything that it relies on about
//! sizes is checked here again, for all loops, before the first byte moves.

mod kernel;
mod work;

use std::thread;

use kvferry_core::cache::RankCache;
use kvferry_core::overlap::Bound;
use kvferry_core::strided::CopyLoop;

use crate::work::{Work, cut};

/// Bytes below which another thread costs more than it brings: starting one takes about 25 µs, in which
/// a core copies some 500 KiB; at 8 MiB that is a few percent.
pub const MIN_THREAD_BYTES: u64 = 8 << 20;

/// Copies everything that the schedules move. At most `threads` threads take part, or as many as the
/// machine runs at once where `None`; small copies use fewer. The result is the same for any number.
///
/// # Panics
///
/// If a loop reaches outside its tensors, before anything is written. Binding rules that out.
///
/// # Safety
///
/// Until this returns, every tensor of the caches must be host memory that is valid for reads, and the
/// targets' for writes by this call alone; [`kvferry_core::overlap::check`] must have accepted the
/// schedules for one process.
pub unsafe fn copy(bound: &[Bound<'_>], threads: Option<usize>) {
    let work: Vec<Work<'_>> = bound.iter().flat_map(works).collect();
    let total_bytes: u64 = work.iter().map(Work::num_bytes).sum();
    let parts = thread_count(total_bytes, threads);
    if parts == 1 {
        for work in &work {
            // SAFETY: the caller guarantees the memory; `works` has checked that each loop lies in it.
            unsafe { kernel::run(work) };
        }
        return;
    }
    let parts = cut(&work, total_bytes, parts);
    thread::scope(|scope| {
        for part in &parts {
            scope.spawn(move || {
                for work in part {
                    // SAFETY: as above; parts name different table entries, so that no two threads
                    // write one byte, and the scope ends before this function returns.
                    unsafe { kernel::run(work) };
                }
            });
        }
    });
}

fn thread_count(total_bytes: u64, threads: Option<usize>) -> usize {
    let available = || thread::available_parallelism().map_or(1, usize::from);
    let useful = usize::try_from(total_bytes / MIN_THREAD_BYTES).unwrap_or(usize::MAX);
    threads.unwrap_or_else(available).min(useful).max(1)
}

fn works<'a>(bound: &Bound<'a>) -> impl Iterator<Item = Work<'a>> {
    let Bound { schedule, source, target } = *bound;
    schedule.loops.iter().map(move |copy| {
        let entries = copy.entries.clone();
        let work = Work {
            strided: copy.strided,
            source: source.tensors[copy.source_tensor].address + copy.source_offset,
            target: target.tensors[copy.target_tensor].address + copy.target_offset,
            source_entries: &schedule.table.source[entries.clone()],
            target_entries: &schedule.table.target[entries],
        };
        check_inside(copy, &work, source, target);
        work
    })
}

fn check_inside(copy: &CopyLoop, work: &Work<'_>, source: &RankCache, target: &RankCache) {
    let (source_span, target_span) = copy.strided.span_bytes();
    let ends = [
        (source, copy.source_tensor, copy.source_offset, work.source_entries, source_span),
        (target, copy.target_tensor, copy.target_offset, work.target_entries, target_span),
    ];
    for (cache, tensor, offset, entries, span_bytes) in ends {
        let furthest = entries.iter().max().copied().unwrap_or(0);
        let end = offset.checked_add(furthest).and_then(|at| at.checked_add(span_bytes));
        let extent_bytes = cache.extent_bytes(tensor);
        assert!(
            end.is_some_and(|end| end <= extent_bytes),
            "a loop of tensor {:?} ends at {end:?}, past its {extent_bytes} bytes",
            cache.slots[tensor].name
        );
    }
}
