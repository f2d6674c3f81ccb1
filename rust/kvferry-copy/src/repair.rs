//! In-place transpositions: through a scratch buffer that stays in cache, or item by item.

#[cfg(test)]
mod tests;

use kvferry_core::copies::repair::{Repair, SCRATCH_BYTES, Transposition};
use kvferry_core::moves::strided::Strided;

use crate::kernel;
use crate::pool;
use crate::work::Work;

/// Repairs every row. Threads as in [`crate::copy`].
///
/// # Panics
///
/// If a row reaches outside its tensor, before anything is written. [`Repair::new`] rules that out.
///
/// # Safety
///
/// Until this returns, the repair's region must be host memory that is valid for reads, and for writes by
/// this call alone.
pub unsafe fn repair(repair: &Repair, threads: Option<usize>) {
    let transposition = &repair.transposition;
    if transposition.is_identity() || repair.rows.is_empty() {
        return; // a tensor of no bytes has no rows
    }
    repair.assert_inside();
    let parts = pool::count(repair.row_bytes().saturating_mul(repair.rows.len() as u64), threads);
    let rows_per_part = repair.rows.len().div_ceil(parts).max(1);
    let parts: Vec<&[u64]> = repair.rows.chunks(rows_per_part).collect();
    pool::run(&parts, |rows| {
        // SAFETY: the caller guarantees the memory, in which each row lies (`assert_inside`); rows are
        // distinct, so that no two threads touch one byte.
        unsafe { repair_rows(repair, rows) };
    });
}

/// # Safety
///
/// As for [`repair`], for these rows.
unsafe fn repair_rows(repair: &Repair, rows: &[u64]) {
    let transposition = &repair.transposition;
    let [planes, parts] = repair.matrices;
    let matrix_bytes = transposition.items() * transposition.item_bytes();
    let mut matrix = Matrix::new(transposition, matrix_bytes);
    for row in rows {
        for plane in 0..planes.count {
            for part in 0..parts.count {
                let address = repair.region.address + row + plane * planes.stride + part * parts.stride;
                // SAFETY: the caller guarantees the row, of which this is a part.
                unsafe { matrix.transpose_at(address) };
            }
        }
    }
}

/// # Safety
///
/// Both ends must be valid for what `strided` reaches from them, for reads at the source and for writes by
/// this call alone at the target, and must not overlap.
unsafe fn copy(strided: &Strided, source: u64, target: u64) {
    // SAFETY: the caller guarantees the memory; `cached` knows the machine.
    unsafe { kernel::cached().run(&Work::single(strided, source, target)) };
}

/// What one thread needs to transpose matrices of one kind.
struct Matrix<'a> {
    transposition: &'a Transposition,
    /// Out of memory, in the order of places, and back into it.
    ways: (Strided, Strided),
    /// A matrix, or an item where a matrix does not fit.
    scratch: Vec<u8>,
    /// Of items that are moved one by one: which have been.
    moved: Option<Vec<u64>>,
}

impl<'a> Matrix<'a> {
    fn new(transposition: &'a Transposition, matrix_bytes: u64) -> Self {
        let is_whole = matrix_bytes <= SCRATCH_BYTES;
        let (ways, scratch_bytes) = if is_whole {
            ((transposition.gather(), transposition.scatter()), matrix_bytes)
        } else {
            (transposition.item_and_back(), transposition.item_bytes())
        };
        let words = transposition.items().div_ceil(64);
        Self {
            transposition,
            ways,
            scratch: vec![0; as_size(scratch_bytes)],
            moved: (!is_whole).then(|| vec![0; as_size(words)]),
        }
    }

    /// # Safety
    ///
    /// The matrix at `address` must be valid for reads, and for writes by this call alone.
    unsafe fn transpose_at(&mut self, address: u64) {
        let scratch = self.scratch.as_mut_ptr().expose_provenance() as u64;
        let (out, back) = &self.ways;
        let Some(moved) = &mut self.moved else {
            // SAFETY: `out` reads the matrix and fills scratch, which has its size; `back` does the reverse.
            unsafe {
                copy(out, address, scratch);
                copy(back, scratch, address);
            }
            return;
        };
        moved.fill(0);
        let item = self.transposition.item();
        let at = |place: u64| address + self.transposition.offset(place);
        for first in 0..self.transposition.items() {
            let mut place = first;
            let mut origin = self.transposition.origin(place);
            if is_marked(moved, first) || origin == first {
                continue;
            }
            // SAFETY: every place is one of the matrix, and scratch has an item's size. Two places of a
            // matrix do not overlap, as its tensor's elements do not.
            unsafe {
                copy(out, at(first), scratch);
                while origin != first {
                    copy(&item, at(origin), at(place));
                    mark(moved, origin);
                    place = origin;
                    origin = self.transposition.origin(place);
                }
                copy(back, scratch, at(place));
            }
        }
    }
}

fn is_marked(marks: &[u64], index: u64) -> bool {
    marks[as_size(index / 64)] & (1 << (index % 64)) != 0
}

fn mark(marks: &mut [u64], index: u64) {
    marks[as_size(index / 64)] |= 1 << (index % 64);
}

/// A number that counts parts of memory that exists.
fn as_size(number: u64) -> usize {
    usize::try_from(number).expect("no more than there are bytes of memory")
}
