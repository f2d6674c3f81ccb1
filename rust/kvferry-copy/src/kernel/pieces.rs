//! Piece by piece: the loops that every kernel is made of.

use std::ptr;

use crate::work::{Piece, Work};

/// Bytes up to which a piece is moved here, vector by vector; calling `memcpy` costs more than that.
const SHORT_BYTES: usize = 512;
/// Bytes of a line, the unit of a stream.
const LINE_BYTES: usize = 64;
/// Bytes by which reading ahead leads: long enough for memory to answer many requests at once, and for the
/// neighbours that come with a strided run to wait for their turn; short enough for a core's second cache.
const AHEAD_BYTES: u64 = 64 << 10;

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

    /// Asks for a line that will be read later to come to the second cache, or does nothing: the first
    /// is too small for all that is asked for, least of all at strides that share its sets.
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

/// Copies each piece past the caches, and line by line asks for those of the piece that will be its turn.
///
/// # Safety
///
/// As for [`super::Kernel::run`].
#[inline(always)]
#[expect(clippy::inline_always, reason = "compiled anew for the features of each caller")]
pub(super) unsafe fn stream_vectors<V: Vector>(work: &Work<'_>) {
    let lead = (AHEAD_BYTES / work.piece_bytes().max(1)).max(1);
    let mut ahead = work.cursor();
    for _ in 0..lead {
        ahead.next();
    }
    for piece in work.cursor() {
        let (source, target, num_bytes) = ends(piece);
        let later = ahead.next().map_or(source, |piece| ends(piece).0);
        // SAFETY: the caller guarantees the piece, and the machine for `V`.
        unsafe { stream_piece::<V>(source, target, num_bytes, later) };
    }
}

/// Whole lines of the target past the caches, what comes before and after them through the caches; asks for
/// as many lines of `later`, of which nothing is read.
///
/// # Safety
///
/// Both ends must be valid for so many bytes and not overlap, and the machine must have `V`.
#[inline(always)]
#[expect(clippy::inline_always, reason = "compiled anew for the features of each caller")]
unsafe fn stream_piece<V: Vector>(source: *const u8, target: *mut u8, num_bytes: usize, later: *const u8) {
    let before = target.align_offset(LINE_BYTES).min(num_bytes);
    let lines_end = before + (num_bytes - before) / LINE_BYTES * LINE_BYTES;
    // SAFETY: the caller guarantees both ends; `target + offset` is a multiple of a line for every offset
    // between `before` and `lines_end`.
    unsafe {
        if before > 0 {
            ptr::copy_nonoverlapping(source, target, before);
        }
        for line in (before..lines_end).step_by(LINE_BYTES) {
            V::prefetch(later.wrapping_add(line));
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
