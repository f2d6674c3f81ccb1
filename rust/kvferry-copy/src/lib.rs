//! The host copier: executes bound schedules on host memory, on one thread or several.
//!
//! This crate holds the only `unsafe` code that touches host memory. Everything that it relies on about
//! sizes is checked here again, for all loops, before the first byte moves.

mod kernel;
mod work;

use std::thread;

use kvferry_core::memory::cache::RankCache;
use kvferry_core::moves::overlap::BoundSchedule;
use kvferry_core::moves::schedule::CopyLoop;

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
/// targets' for writes by this call alone; [`kvferry_core::moves::overlap::check`] must have accepted the
/// schedules for one process.
pub unsafe fn copy(bound: &[BoundSchedule<'_>], threads: Option<usize>) {
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
    let run_part = |part: &[Work<'_>]| {
        for work in part {
            // SAFETY: as above; parts name different table entries, so that no two threads write one
            // byte, and the scope below ends before this function returns.
            unsafe { kernel::run(work) };
        }
    };
    let parts = cut(&work, total_bytes, parts);
    let (own, others) = parts.split_first().unwrap_or((&work, &[]));
    thread::scope(|scope| {
        let start = |part| thread::Builder::new().spawn_scoped(scope, move || run_part(part)).is_ok();
        let left: Vec<_> = others.iter().filter(|part| !start(part)).collect();
        run_part(own);
        for part in left {
            run_part(part); // no thread could be had for it
        }
    });
}

/// Threads that take part, this one included.
fn thread_count(total_bytes: u64, threads: Option<usize>) -> usize {
    let available = || thread::available_parallelism().map_or(1, usize::from);
    let useful = usize::try_from(total_bytes / MIN_THREAD_BYTES).unwrap_or(usize::MAX);
    threads.unwrap_or_else(available).min(useful).max(1)
}

fn works<'a>(bound: &BoundSchedule<'a>) -> impl Iterator<Item = Work<'a>> {
    let BoundSchedule { schedule, source, target } = *bound;
    schedule.loops.iter().map(move |copy| {
        let entries = copy.entries.clone();
        let work = Work {
            strided: copy.strided,
            source: source.tensors[copy.source_tensor].address + copy.source_offset,
            target: target.tensors[copy.target_tensor].address + copy.target_offset,
            source_entries: &schedule.table.source[entries.clone()],
            target_entries: &schedule.table.target[entries],
        };
        let extent = |cache: &RankCache, tensor| cache.extent_bytes(tensor);
        let extents = (extent(source, copy.source_tensor), extent(target, copy.target_tensor));
        if let Err(end) = check_inside(copy, &work, extents.0, extents.1) {
            panic!("a copy loop ends at {end:?}, past tensors of {extents:?} bytes");
        }
        work
    })
}

/// Whether a loop stays inside its tensors; the error is where it ends, if that can be counted.
fn check_inside(
    copy: &CopyLoop,
    work: &Work<'_>,
    source_bytes: u64,
    target_bytes: u64,
) -> Result<(), Option<u64>> {
    let (source_span, target_span) = copy.strided.span_bytes();
    let ends = [
        (copy.source_offset, work.source_entries, source_span, source_bytes),
        (copy.target_offset, work.target_entries, target_span, target_bytes),
    ];
    for (offset, entries, span_bytes, extent_bytes) in ends {
        let furthest = entries.iter().max().copied().unwrap_or(0);
        let end = offset.checked_add(furthest).and_then(|at| at.checked_add(span_bytes));
        if end.is_none_or(|end| end > extent_bytes) {
            return Err(end);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kvferry_core::moves::strided::{Dim, Strided};

    use super::*;

    #[test]
    fn small_copies_use_one_thread() {
        assert_eq!(thread_count(0, Some(8)), 1);
        assert_eq!(thread_count(2 * MIN_THREAD_BYTES - 1, Some(8)), 1);
        assert_eq!(thread_count(2 * MIN_THREAD_BYTES, Some(8)), 2);
        assert_eq!(thread_count(100 * MIN_THREAD_BYTES, Some(3)), 3);
        assert_eq!(thread_count(100 * MIN_THREAD_BYTES, Some(0)), 1);
    }

    /// What `check_inside` says of a loop of 4 × 3 bytes, 5 apart, of entries at 0 and 7, in 30 bytes.
    fn reaches(source_offset: u64, target_offset: u64) -> bool {
        let dim = Dim { count: 4, source_stride: 5, target_stride: 5 };
        let strided = Strided::new(3, [dim]).unwrap();
        let copy = CopyLoop {
            source_tensor: 0,
            target_tensor: 0,
            source_offset,
            target_offset,
            strided,
            entries: 0..2,
        };
        let table = [0, 7];
        let (source_entries, target_entries) = (&table[..], &table[..]);
        let work = Work { strided, source: 0, target: 0, source_entries, target_entries };
        check_inside(&copy, &work, 30, 30).is_err()
    }

    #[test]
    fn a_loop_may_end_with_its_tensor_and_no_later() {
        assert!(!reaches(5, 5)); // 5 + 7 + 3 * 5 + 3 = 30
        assert!(reaches(6, 5));
        assert!(reaches(5, 6));
        assert!(reaches(u64::MAX, 0));
    }
}
