//! Work: a copy loop with absolute addresses, as a sequence of pieces that may be cut anywhere.

use std::borrow::Cow;
use std::ops::Range;

use kvferry_core::moves::strided::{Dim, MAX_DIMS, Strided};

/// The dimensions of a loop, its table entries, and the pieces of a run.
const MAX_LEVELS: usize = MAX_DIMS + 2;

/// Strided copies at every entry of a table, counted in pieces.
#[derive(Clone, Debug)]
pub(crate) struct Work<'a> {
    /// Address to which source entries are added.
    source: u64,
    /// Address to which target entries are added.
    target: u64,
    source_entries: Cow<'a, [u64]>,
    target_entries: Cow<'a, [u64]>,
    /// What is looped over, outermost first; unused ones lead.
    levels: [Dim; MAX_LEVELS],
    /// Where the used levels begin.
    first_level: usize,
    /// The level that walks the entries, past all levels where there is one entry.
    entries_level: usize,
    /// Bytes of a run.
    run_bytes: u64,
    /// Bytes of a piece but the last of a run.
    piece_bytes: u64,
    /// The pieces to copy.
    pieces: Range<u64>,
}

impl<'a> Work<'a> {
    /// All of a loop, in pieces of at most `piece_bytes`.
    pub fn new(
        strided: &Strided,
        (source, source_entries): (u64, &'a [u64]),
        (target, target_entries): (u64, &'a [u64]),
        piece_bytes: u64,
    ) -> Self {
        let (source_entries, target_entries) = in_order(source_entries, target_entries, strided.num_bytes());
        let table_bytes = extent(&target_entries);
        let dims = strided.looping();
        // What steps over the whole table goes around it, so that memory is walked in one direction.
        let around = dims.iter().take_while(|dim| dim.target_stride > table_bytes).count();
        let piece_bytes = piece_bytes.min(strided.run_bytes);
        let runs = Dim { count: target_entries.len() as u64, source_stride: 0, target_stride: 0 };
        let pieces = Dim {
            count: strided.run_bytes.div_ceil(piece_bytes.max(1)),
            source_stride: piece_bytes,
            target_stride: piece_bytes,
        };
        let (outer, inner) = dims.split_at(around);
        let looping = |dim: &Dim| dim.count != 1;
        let used: Vec<Dim> =
            outer.iter().chain([&runs]).chain(inner).chain([&pieces]).copied().filter(looping).collect();
        let first_level = MAX_LEVELS - used.len();
        let mut levels = [Dim::ONE; MAX_LEVELS];
        levels[first_level..].copy_from_slice(&used);
        let entries_level = if looping(&runs) { first_level + outer.len() } else { MAX_LEVELS };
        let total = used.iter().map(|dim| dim.count).product();
        Self {
            source,
            target,
            source_entries,
            target_entries,
            levels,
            first_level,
            entries_level,
            run_bytes: strided.run_bytes,
            piece_bytes,
            pieces: 0..total,
        }
    }

    /// One strided copy between two addresses.
    pub fn single(strided: &Strided, source: u64, target: u64) -> Work<'static> {
        Work::new(strided, (source, &[0]), (target, &[0]), u64::MAX)
    }

    /// Bytes moved, as if every piece were whole.
    pub fn num_bytes(&self) -> u64 {
        (self.pieces.end - self.pieces.start) * self.piece_bytes
    }

    /// Bytes of a piece but the last of a run.
    pub fn piece_bytes(&self) -> u64 {
        self.piece_bytes
    }

    /// Bytes that every target address is a multiple of, at most a cache line.
    pub fn target_alignment(&self) -> u64 {
        let strides = self
            .levels
            .iter()
            .fold(self.target | self.piece_bytes | 64, |bits, dim| bits | dim.target_stride);
        let bits = self.target_entries.iter().fold(strides, |bits, entry| bits | entry);
        1 << bits.trailing_zeros()
    }

    /// The first pieces, as many as begin within `bytes`, and the others.
    fn split(self, bytes: u64) -> (Self, Self) {
        let taken = bytes.div_ceil(self.piece_bytes.max(1));
        let at = self.pieces.start.saturating_add(taken).min(self.pieces.end);
        let later = Self { pieces: at..self.pieces.end, ..self.clone() };
        (Self { pieces: self.pieces.start..at, ..self }, later)
    }

    /// A cursor on the first piece.
    pub fn cursor(&self) -> Cursor<'_> {
        let mut index = [0; MAX_LEVELS];
        let mut rest = self.pieces.start;
        let (mut source, mut target) = (self.source, self.target);
        for level in (self.first_level..MAX_LEVELS).rev() {
            let dim = self.levels[level];
            let (above, at) = if rest == 0 { (0, 0) } else { (rest / dim.count, rest % dim.count) };
            rest = above;
            index[level] = at;
            source += at * dim.source_stride;
            target += at * dim.target_stride;
        }
        let entry = as_index(index.get(self.entries_level).copied().unwrap_or(0));
        source += self.source_entries.get(entry).copied().unwrap_or(0);
        target += self.target_entries.get(entry).copied().unwrap_or(0);
        Cursor { work: self, index, source, target, left: self.pieces.end - self.pieces.start }
    }
}

/// Walks the pieces of a work in their order.
#[derive(Clone, Debug)]
pub(crate) struct Cursor<'a> {
    work: &'a Work<'a>,
    index: [u64; MAX_LEVELS],
    source: u64,
    target: u64,
    left: u64,
}

/// One contiguous copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Address.
    pub source: u64,
    /// Address.
    pub target: u64,
    /// Bytes.
    pub num_bytes: u64,
}

impl Iterator for Cursor<'_> {
    type Item = Piece;

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "one call a piece, of which there may be millions")]
    fn next(&mut self) -> Option<Piece> {
        self.left = self.left.checked_sub(1)?;
        let work = self.work;
        let piece = Piece { source: self.source, target: self.target, num_bytes: self.num_bytes() };
        for level in (work.first_level..MAX_LEVELS).rev() {
            let dim = &work.levels[level];
            let at = self.index[level] + 1;
            let wraps = at == dim.count;
            self.index[level] = if wraps { 0 } else { at };
            // Addresses wrap around on purpose: entries need not ascend, and the last step goes back.
            if level == work.entries_level {
                let (from, to) = (as_index(at - 1), as_index(self.index[level]));
                let step = |entries: &[u64]| entries[to].wrapping_sub(entries[from]);
                self.source = self.source.wrapping_add(step(&work.source_entries));
                self.target = self.target.wrapping_add(step(&work.target_entries));
            } else if wraps {
                self.source = self.source.wrapping_sub((dim.count - 1) * dim.source_stride);
                self.target = self.target.wrapping_sub((dim.count - 1) * dim.target_stride);
            } else {
                self.source = self.source.wrapping_add(dim.source_stride);
                self.target = self.target.wrapping_add(dim.target_stride);
            }
            if !wraps {
                break;
            }
        }
        Some(piece)
    }
}

impl Cursor<'_> {
    /// Bytes of the piece that it is on.
    fn num_bytes(&self) -> u64 {
        let work = self.work;
        if work.piece_bytes == work.run_bytes {
            return work.run_bytes;
        }
        let before = self.index[MAX_LEVELS - 1] * work.piece_bytes; // pieces of a run are the last level
        work.piece_bytes.min(work.run_bytes - before)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "entries lie in memory, whose indices fit")]
fn as_index(entry: u64) -> usize {
    entry as usize
}

/// Entries in the order in which they are visited: that of the targets, which is theirs, unless only the
/// sources are dense. The side that is dense is then walked without leaps.
fn in_order<'a>(source: &'a [u64], target: &'a [u64], entry_bytes: u64) -> (Cow<'a, [u64]>, Cow<'a, [u64]>) {
    let is_dense = |entries: &[u64]| extent(entries) / 2 <= entry_bytes.saturating_mul(entries.len() as u64);
    if is_dense(target) || !is_dense(source) {
        return (Cow::Borrowed(source), Cow::Borrowed(target));
    }
    let mut pairs: Vec<(u64, u64)> = source.iter().copied().zip(target.iter().copied()).collect();
    pairs.sort_unstable();
    let (source, target): (Vec<u64>, Vec<u64>) = pairs.into_iter().unzip();
    (Cow::Owned(source), Cow::Owned(target))
}

/// Bytes from the lowest entry to the highest.
fn extent(entries: &[u64]) -> u64 {
    let (lowest, highest) = entries.iter().fold((u64::MAX, 0), |(low, high), e| (low.min(*e), high.max(*e)));
    highest.saturating_sub(lowest)
}

/// Cuts work into `parts` of about equal bytes.
pub(crate) fn cut(work: Vec<Work<'_>>, parts: usize) -> Vec<Vec<Work<'_>>> {
    if parts == 1 {
        return vec![work];
    }
    let total_bytes: u64 = work.iter().map(Work::num_bytes).sum();
    let quota = total_bytes.div_ceil(parts as u64).max(1);
    let mut cut = vec![Vec::new()];
    let mut room = quota;
    for mut rest in work {
        while !rest.pieces.is_empty() {
            if room == 0 && cut.len() < parts {
                cut.push(Vec::new());
                room = quota;
            }
            let is_last = cut.len() == parts;
            let (now, later) = rest.split(if is_last { u64::MAX } else { room });
            room = room.saturating_sub(now.num_bytes());
            if let Some(part) = cut.last_mut() {
                part.push(now);
            }
            rest = later;
        }
    }
    cut
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn dims() -> impl Strategy<Value = Vec<Dim>> {
        let dim = (1_u64..4, 1_u64..5, 1_u64..2000).prop_map(|(count, source, target)| Dim {
            count,
            source_stride: source * 64,
            target_stride: target * 64,
        });
        prop::collection::vec(dim, 0..=MAX_DIMS)
    }

    /// Every byte's source and target, in the order of the work.
    fn bytes(work: &[Work<'_>]) -> Vec<(u64, u64)> {
        let piece =
            |piece: Piece| (0..piece.num_bytes).map(move |byte| (piece.target + byte, piece.source + byte));
        work.iter().flat_map(|work| work.cursor().flat_map(piece)).collect()
    }

    proptest! {
        #[test]
        fn pieces_are_the_loops_bytes_however_they_are_cut(
            run_bytes in 1_u64..70,
            dims in dims(),
            entries in prop::collection::vec((0_u64..9000, 0_u64..9000), 0..12),
            piece_bytes in 1_u64..40,
            parts in 1_usize..6,
        ) {
            let strided = Strided::new(run_bytes, dims.iter().copied()).unwrap();
            let (sources, targets): (Vec<u64>, Vec<u64>) = entries.iter().copied().unzip();
            let work = Work::new(&strided, (1000, &sources), (5000, &targets), piece_bytes);
            let mut expected = Vec::new();
            for (source, target) in &entries {
                kvferry_core::moves::strided::each_step(&strided.dims, 1000 + source, 5000 + target, &mut |s, t| {
                    expected.extend((0..strided.run_bytes).map(|byte| (t + byte, s + byte)));
                });
            }
            let whole = bytes(std::slice::from_ref(&work));
            let cut = cut(vec![work], parts);
            prop_assert!(cut.len() <= parts);
            prop_assert_eq!(&bytes(&cut.concat()), &whole);
            let (mut whole, mut expected) = (whole, expected);
            whole.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(whole, expected);
        }
    }
}
