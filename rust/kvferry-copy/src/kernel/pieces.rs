//! Piece by piece: the loops that every kernel is made of.

use std::ptr;

use crate::work::{Row, SinglePieces, Work};

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
    for row in work.rows() {
        for piece in Pieces(row) {
            // SAFETY: the caller guarantees the piece.
            unsafe { ptr::copy_nonoverlapping(piece.source, piece.target, piece.num_bytes) };
        }
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
    for row in work.rows() {
        for Piece { source, target, num_bytes } in Pieces(row) {
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
}

/// Copies each piece past the caches, and line by line asks for those of the piece that will be its turn.
///
/// # Safety
///
/// As for [`super::Kernel::run`].
#[inline(always)]
#[expect(clippy::inline_always, reason = "compiled anew for the features of each caller")]
pub(super) unsafe fn stream_vectors<V: Vector>(work: &Work<'_>) {
    let mut lines = Lines::new();
    // SAFETY: the caller guarantees the work, and the machine for `V`; what is left of the last piece belongs
    // to it.
    unsafe {
        match work.single_pieces() {
            Some(pieces) => stream_pieces::<V>(&mut lines, &pieces, work.piece_bytes()),
            None => stream_rows::<V>(&mut lines, work),
        }
        lines.flush();
    }
}

/// Streams pieces that only a table tells apart.
///
/// # Safety
///
/// As for [`super::Kernel::run`].
#[inline(always)]
#[expect(clippy::inline_always, reason = "compiled anew for the features of each caller")]
unsafe fn stream_pieces<V: Vector>(lines: &mut Lines, pieces: &SinglePieces<'_>, piece_bytes: u64) {
    let SinglePieces { source, target, source_entries, target_entries } = pieces;
    let lead = usize::try_from(AHEAD_BYTES / piece_bytes.max(1)).unwrap_or(usize::MAX).max(1);
    let later = source_entries.iter().skip(lead).chain(source_entries.last().into_iter().cycle());
    for ((source_entry, target_entry), later) in source_entries.iter().zip(*target_entries).zip(later) {
        let piece = Piece::new(source + source_entry, target + target_entry, piece_bytes);
        // SAFETY: the caller guarantees the piece, and the machine for `V`.
        unsafe { lines.push::<V>(piece.source, piece.target, piece.num_bytes, source_at(source + later)) };
    }
}

/// Streams pieces a row at a time.
///
/// # Safety
///
/// As for [`super::Kernel::run`].
#[inline(always)]
#[expect(clippy::inline_always, reason = "compiled anew for the features of each caller")]
unsafe fn stream_rows<V: Vector>(lines: &mut Lines, work: &Work<'_>) {
    let row_bytes = work.piece_bytes().saturating_mul(work.row_pieces()).max(1);
    let mut ahead = work.rows();
    for _ in 0..(AHEAD_BYTES / row_bytes) {
        ahead.next();
    }
    // Within a long row, the pieces to ask for are those that follow.
    let lead = if row_bytes > AHEAD_BYTES { AHEAD_BYTES / work.piece_bytes().max(1) } else { 0 };
    for row in work.rows() {
        let later = if lead > 0 { row } else { ahead.next().unwrap_or(row) };
        let mut later_source = later.source.wrapping_add(lead.wrapping_mul(later.source_stride));
        for Piece { source, target, num_bytes } in Pieces(row) {
            // SAFETY: the caller guarantees the piece, and the machine for `V`.
            unsafe { lines.push::<V>(source, target, num_bytes, source_at(later_source)) };
            later_source = later_source.wrapping_add(later.source_stride);
        }
    }
}

/// Writes whole lines past the caches. A line that one piece begins and the next one ends is put together
/// first; only what has no neighbour is written through the caches.
struct Lines {
    /// The last line's worth of the piece before, and the first of this one.
    joint: [u8; 2 * LINE_BYTES],
    /// Bytes at the end of the piece before that are not written yet: the beginning of a line.
    pending: usize,
    /// Where that piece ends.
    end: *mut u8,
}

impl Lines {
    fn new() -> Self {
        Self { joint: [0; 2 * LINE_BYTES], pending: 0, end: ptr::null_mut() }
    }

    /// Copies a piece, but for the beginning of a line at its end; asks for as many lines of `later`, of which
    /// nothing is read.
    ///
    /// # Safety
    ///
    /// Both ends must be valid for so many bytes and not overlap, those of the piece before must still be,
    /// and the machine must have `V`.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "compiled anew for the features of each caller")]
    unsafe fn push<V: Vector>(
        &mut self,
        source: *const u8,
        target: *mut u8,
        num_bytes: usize,
        later: *const u8,
    ) {
        // SAFETY: the caller guarantees both ends. Lines begin at multiples of a line, and all of one belongs
        // to this piece, or to the one before and this.
        unsafe {
            if num_bytes < LINE_BYTES || target != self.end {
                self.flush();
            }
            if num_bytes < LINE_BYTES {
                return ptr::copy_nonoverlapping(source, target, num_bytes);
            }
            let begin = if self.pending > 0 {
                let head = self.joint.as_mut_ptr().add(LINE_BYTES);
                for offset in (0..LINE_BYTES).step_by(V::BYTES) {
                    V::load(source.add(offset)).store(head.add(offset));
                }
                let (joined, line) = (head.sub(self.pending), target.sub(self.pending));
                for offset in (0..LINE_BYTES).step_by(V::BYTES) {
                    V::load(joined.add(offset)).stream(line.add(offset));
                }
                LINE_BYTES - self.pending
            } else {
                let before = target.align_offset(LINE_BYTES);
                if before > 0 {
                    ptr::copy_nonoverlapping(source, target, before);
                }
                before
            };
            let lines_end = begin + (num_bytes - begin) / LINE_BYTES * LINE_BYTES;
            for at in (begin..lines_end).step_by(LINE_BYTES) {
                V::prefetch(later.wrapping_add(at));
                for offset in (at..at + LINE_BYTES).step_by(V::BYTES) {
                    V::load(source.add(offset)).stream(target.add(offset));
                }
            }
            self.pending = num_bytes - lines_end;
            self.end = target.add(num_bytes);
            if self.pending > 0 {
                let (tail, joint) = (source.add(num_bytes - LINE_BYTES), self.joint.as_mut_ptr());
                for offset in (0..LINE_BYTES).step_by(V::BYTES) {
                    V::load(tail.add(offset)).store(joint.add(offset));
                }
            }
        }
    }

    /// Writes what is pending through the caches.
    ///
    /// # Safety
    ///
    /// The target of the piece before must still be valid.
    unsafe fn flush(&mut self) {
        if self.pending > 0 {
            let begin = LINE_BYTES - self.pending;
            // SAFETY: they are the last bytes of that piece.
            unsafe {
                let target = self.end.sub(self.pending);
                ptr::copy_nonoverlapping(self.joint.as_ptr().add(begin), target, self.pending);
            }
            self.pending = 0;
        }
    }
}

/// One contiguous copy.
struct Piece {
    source: *const u8,
    target: *mut u8,
    num_bytes: usize,
}

impl Piece {
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "one call a piece")]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "addresses and sizes of memory fit a pointer's width"
    )]
    fn new(source: u64, target: u64, num_bytes: u64) -> Self {
        let target = ptr::with_exposed_provenance_mut(target as usize);
        Self { source: source_at(source), target, num_bytes: num_bytes as usize }
    }
}

/// The pieces of a row.
struct Pieces(Row);

impl Iterator for Pieces {
    type Item = Piece;

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "one call a piece, of which there may be millions")]
    fn next(&mut self) -> Option<Piece> {
        let row = &mut self.0;
        row.pieces = row.pieces.checked_sub(1)?;
        let num_bytes = if row.pieces == 0 { row.last_bytes } else { row.piece_bytes };
        let piece = Piece::new(row.source, row.target, num_bytes);
        row.source = row.source.wrapping_add(row.source_stride);
        row.target = row.target.wrapping_add(row.target_stride);
        Some(piece)
    }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "one call a piece")]
#[expect(clippy::cast_possible_truncation, reason = "addresses of memory fit a pointer's width")]
fn source_at(address: u64) -> *const u8 {
    ptr::with_exposed_provenance(address as usize)
}
