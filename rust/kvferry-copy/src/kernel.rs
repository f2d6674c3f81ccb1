//! The loop nest that moves the bytes.

use std::ptr;

use kvferry_core::moves::strided::{Dim, Strided};

use crate::work::Work;

/// Copies every run of `work`.
///
/// # Safety
///
/// Each run must lie in memory that is valid for reads at its source and for writes at its target, and
/// no run may overlap another's target.
pub(crate) unsafe fn run(work: &Work<'_>) {
    for (source_entry, target_entry) in work.source_entries.iter().zip(work.target_entries) {
        // SAFETY: the caller guarantees the same for all of `work`.
        unsafe { copy(&work.strided, work.source + source_entry, work.target + target_entry) };
    }
}

/// Copies every run of `strided` between two addresses.
///
/// # Safety
///
/// As for [`run`].
pub(crate) unsafe fn copy(strided: &Strided, source: u64, target: u64) {
    let [outer @ .., inner] = &strided.dims;
    // SAFETY: the caller guarantees the runs that these dimensions reach.
    unsafe { nest(outer, *inner, strided.run_bytes, source, target) };
}

/// Steps through the outer dimensions, the first one slowest, and copies along the inner one.
///
/// # Safety
///
/// As for [`run`], for the runs that these dimensions reach from the two addresses.
unsafe fn nest(outer: &[Dim], inner: Dim, run_bytes: u64, source: u64, target: u64) {
    match outer.split_first() {
        // SAFETY: the caller guarantees the runs along `inner`.
        None => unsafe { along(inner, run_bytes, source, target) },
        Some((dim, rest)) => {
            for step in 0..dim.count {
                let source = source + step * dim.source_stride;
                // SAFETY: one step's runs are among those that the caller guarantees.
                unsafe { nest(rest, inner, run_bytes, source, target + step * dim.target_stride) };
            }
        }
    }
}

/// Copies the runs along one dimension.
///
/// # Safety
///
/// As for [`run`].
#[expect(clippy::cast_possible_truncation, reason = "addresses and sizes of memory fit a pointer's width")]
unsafe fn along(dim: Dim, run_bytes: u64, source: u64, target: u64) {
    for step in 0..dim.count {
        let from = ptr::with_exposed_provenance::<u8>((source + step * dim.source_stride) as usize);
        let to = ptr::with_exposed_provenance_mut::<u8>((target + step * dim.target_stride) as usize);
        // SAFETY: the caller guarantees both runs; what is written is never what is read.
        unsafe { ptr::copy_nonoverlapping(from, to, run_bytes as usize) };
    }
}
