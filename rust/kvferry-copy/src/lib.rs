//! The host copier: executes bound schedules on host memory, on one thread or several.
//!
//! A schedule's loops become work that can be cut into equal parts anywhere; a kernel copies it, on the
//! threads of a pool where that pays. The result is the same for every kernel and any number of threads.
//!
//! This crate holds the only `unsafe` code that touches host memory. Everything that it relies on about
//! sizes is checked here again, for all loops, before the first byte moves.

mod kernel;
mod machine;
mod pool;
mod repair;
mod work;

use kvferry_core::memory::region::Region;
use kvferry_core::moves::overlap::BoundSchedule;

use crate::kernel::Kernel;
pub use crate::kernel::{forced as forced_kernel, supported as supported_kernels};
pub use crate::pool::{MAX_THREADS, MIN_THREAD_BYTES, default_threads, set_default_threads};
pub use crate::repair::repair;
use crate::work::{Work, cut};

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
    let work: Vec<Work<'_>> = bound.iter().flat_map(|bound| works(bound, kernel)).collect();
    pool::run(&cut(work, pool::count(total_bytes, threads)), |part| {
        for work in part {
            // SAFETY: the caller guarantees the memory, in which each loop lies (`works`); parts name
            // different pieces, so that no two threads write one byte. `choose` knows the machine.
            unsafe { kernel.run(work) };
        }
    });
}

fn works<'a>(bound: &BoundSchedule<'a>, kernel: Kernel) -> impl Iterator<Item = Work<'a>> {
    let BoundSchedule { schedule, source, target } = *bound;
    schedule.loops.iter().map(move |copy| {
        let (source, target) = (&source[copy.source_tensor], &target[copy.target_tensor]);
        let source_entries = &schedule.table.source[copy.entries.clone()];
        let target_entries = &schedule.table.target[copy.entries.clone()];
        let (source_span, target_span) = copy.strided.span_bytes();
        check_inside(source, copy.source_offset, source_entries, source_span);
        check_inside(target, copy.target_offset, target_entries, target_span);
        let source = (source.address + copy.source_offset, source_entries);
        let target = (target.address + copy.target_offset, target_entries);
        Work::new(&copy.strided, source, target, kernel.piece_bytes())
    })
}

/// Refuses a loop that reaches past its tensor.
fn check_inside(region: &Region, offset: u64, entries: &[u64], span_bytes: u64) {
    let furthest = entries.iter().max().copied().unwrap_or(0);
    let end = offset.checked_add(furthest).and_then(|at| at.checked_add(span_bytes));
    let Region { name, extent_bytes, .. } = region;
    assert!(
        end.is_some_and(|end| end <= *extent_bytes),
        "a copy loop ends at {end:?}, past the {extent_bytes} bytes of {name}"
    );
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use kvferry_core::memory::tensor::Device;

    use super::*;

    #[test]
    fn a_loop_may_end_with_its_tensor_and_no_later() {
        let region = Region {
            name: "memory".to_owned(),
            address: 0,
            extent_bytes: 30,
            block_stride: 10,
            device: Device::CPU,
            writable: true,
        };
        let is_inside = |offset| catch_unwind(|| check_inside(&region, offset, &[0, 7], 18)).is_ok();
        assert!(is_inside(5)); // 5 + 7 + 18 = 30
        assert!(!is_inside(6));
        assert!(!is_inside(u64::MAX));
    }
}
