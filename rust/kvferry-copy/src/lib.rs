//! The host copier: executes bound schedules on host memory, on one thread or several.
//!
//! This crate holds the only `unsafe` code that touches host memory. Everything that it relies on about
//! sizes is checked here again, for all loops, before the first byte moves.

mod kernel;
mod repair;
mod threads;
mod work;

use kvferry_core::moves::overlap::BoundSchedule;
use kvferry_core::moves::schedule::CopyLoop;

pub use crate::repair::repair;
pub use crate::threads::MIN_THREAD_BYTES;
use crate::work::{Work, cut};

/// Copies everything that the schedules move. At most `threads` threads take part, or as many as the
/// machine runs at once where `None`; small copies use fewer. The result is the same for any number.
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
    let work: Vec<Work<'_>> = bound.iter().flat_map(works).collect();
    let total_bytes: u64 = work.iter().map(Work::num_bytes).sum();
    let parts = cut(&work, total_bytes, threads::count(total_bytes, threads));
    threads::run(&parts, |part| {
        for work in part {
            // SAFETY: the caller guarantees the memory, in which each loop lies (`works`); parts name
            // different table entries, so that no two threads write one byte.
            unsafe { kernel::run(work) };
        }
    });
}

fn works<'a>(bound: &BoundSchedule<'a>) -> impl Iterator<Item = Work<'a>> {
    let BoundSchedule { schedule, source, target } = *bound;
    schedule.loops.iter().map(move |copy| {
        let entries = copy.entries.clone();
        let work = Work {
            strided: copy.strided,
            source: source[copy.source_tensor].address + copy.source_offset,
            target: target[copy.target_tensor].address + copy.target_offset,
            source_entries: &schedule.table.source[entries.clone()],
            target_entries: &schedule.table.target[entries],
        };
        let extents = (source[copy.source_tensor].extent_bytes, target[copy.target_tensor].extent_bytes);
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
