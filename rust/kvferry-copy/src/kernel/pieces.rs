//! Piece by piece: the loops that every kernel is made of.

use std::ptr;

use crate::work::{Piece, Work};

/// Bytes up to which a piece is moved here, vector by vector; calling `memcpy` costs more than that.
const SHORT_BYTES: usize = 512;
/// Bytes of a line, the unit of a stream.
const LINE_BYTES: usize = 64;
/// Lines at the head of a piece that are asked for ahead of time: from there the hardware goes on itself.
const AHEAD_LINES: usize = 8;
/// Bytes by which reading ahead leads, in pieces of this size altogether.
const AHEAD_BYTES: u64 = 8192;
/// Fewest and most pieces by which it leads.
const AHEAD_PIECES: (u64, u64) = (2, 32);

/// A vector register.
pub(super) trait Vector: Copy {
    /// Its bytes, of which a line has a multiple.
    const BYTES: usize;

    /// Reads it from anywhere.
    ///
    /// # Safety
    ///
    /// Its bytes must be valid for reads, and the machine must have such registers.
    unsafe fn load(source: *const u8) -> Self;

    /// Writes it anywhere.
    ///
    /// # Safety
    ///
    /// Its bytes must be valid for writes, and the machine must have such registers.
    unsafe fn store(self, target: *mut u8);

    /// Writes it past the caches.
    ///
    /// # Safety
    ///
    /// As for `store`, and `target` must be a multiple of its bytes.
    unsafe fn stream(self, target: *mut u8);

    /// Asks for a line that will be read, or does nothing.
    fn prefetch(source: *const u8);
}

/// Copies each piece by `memcpy`.
///
/// # Safety
///
/// As for [`super::Kernel::run`].
pub(super) unsafe fn copy_each(work: &Work<'_>) {
    for piece in work.cursor() {
        let (source, target, num_bytes) = ends(piece);
        // SAFETY: the caller guarantees the piece.
        unsafe { ptr::copy_nonoverlapping(source, target, num_bytes) };
    }
}

/// Copies each piece through the caches, short ones without a call.
///
/// # Safety
///
/// As for [`super::Kernel::run`].
#[inline(always)]
#[expect(clippy::inline_always, reason = "compiled anew for the features of each caller")]
pub(super) unsafe fn copy_vectors<V: Vector>(work: &Work<'_>) {
    for piece in work.cursor() {
        let (source, target, num_bytes) = ends(piece);
        // SAFETY: the caller guarantees the piece, and the machine for `V`.
        unsafe {
            if num_bytes > SHORT_BYTES || num_bytes < V::BYTES {
                ptr::copy_nonoverlapping(source, target, num_bytes);
            } else {
                // The last vector ends with the piece, and may overlap the one before it.
                let last = num_bytes - V::BYTES;
                let tail = V::load(source.add(last));
                for offset in (0..last).step_by(V::BYTES) {
                    V::load(source.add(offset)).store(target.add(offset));
                }
                tail.store(target.add(last));
            }
        }
    }
}

/// Copies each piece past the caches, asking ahead for those that follow.
///
/// # Safety
///
/// As for [`super::Kernel::run`].
#[inline(always)]
#[expect(clippy::inline_always, reason = "compiled anew for the features of each caller")]
pub(super) unsafe fn stream_vectors<V: Vector>(work: &Work<'_>) {
    let piece_bytes = work.piece_bytes();
    let lines = usize::try_from(piece_bytes).unwrap_or(usize::MAX).div_ceil(LINE_BYTES).min(AHEAD_LINES);
    let lead = (AHEAD_BYTES / piece_bytes.max(1)).clamp(AHEAD_PIECES.0, AHEAD_PIECES.1);
    let mut ahead = work.cursor();
    let prefetch = |piece: Option<Piece>| {
        let Some(piece) = piece else { return };
        let (source, ..) = ends(piece);
        for line in 0..lines {
            V::prefetch(source.wrapping_add(line * LINE_BYTES));
        }
    };
    for _ in 0..lead {
        prefetch(ahead.next());
    }
    for piece in work.cursor() {
        prefetch(ahead.next());
        let (source, target, num_bytes) = ends(piece);
        // SAFETY: the caller guarantees the piece, and the machine for `V`.
        unsafe { stream_piece::<V>(source, target, num_bytes) };
    }
}

/// Whole lines of the target past the caches, what comes before and after them through the caches.
///
/// # Safety
///
/// Both ends must be valid for so many bytes and not overlap, and the machine must have `V`.
#[inline(always)]
#[expect(clippy::inline_always, reason = "compiled anew for the features of each caller")]
unsafe fn stream_piece<V: Vector>(source: *const u8, target: *mut u8, num_bytes: usize) {
    let before = target.align_offset(LINE_BYTES).min(num_bytes);
    let lines_end = before + (num_bytes - before) / LINE_BYTES * LINE_BYTES;
    // SAFETY: the caller guarantees both ends; `target + offset` is a multiple of a line for every offset
    // between `before` and `lines_end`.
    unsafe {
        if before > 0 {
            ptr::copy_nonoverlapping(source, target, before);
        }
        for line in (before..lines_end).step_by(LINE_BYTES) {
            for offset in (line..line + LINE_BYTES).step_by(V::BYTES) {
                V::load(source.add(offset)).stream(target.add(offset));
            }
        }
        if lines_end < num_bytes {
            ptr::copy_nonoverlapping(source.add(lines_end), target.add(lines_end), num_bytes - lines_end);
        }
    }
}

/// The ends of a piece as pointers.
#[inline(always)]
#[expect(clippy::inline_always, reason = "one call a piece")]
#[expect(clippy::cast_possible_truncation, reason = "addresses and sizes of memory fit a pointer's width")]
fn ends(piece: Piece) -> (*const u8, *mut u8, usize) {
    (
        ptr::with_exposed_provenance(piece.source as usize),
        ptr::with_exposed_provenance_mut(piece.target as usize),
        piece.num_bytes as usize,
    )
}
