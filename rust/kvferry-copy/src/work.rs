//! Work: a copy loop with absolute addresses, as a sequence of pieces that may be cut anywhere.

use std::borrow::Cow;
use std::ops::Range;

use kvferry_core::moves::strided::{Dim, MAX_DIMS, Strided};

/// The dimensions of a loop, its table entries, and the pieces of a run.
const MAX_LEVELS: usize = MAX_DIMS + 2;
/// The innermost level.
const ROW_LEVEL: usize = MAX_LEVELS - 1;

/// The same strided copies at every entry of a table, from one source or several, counted in pieces.
#[derive(Clone, Debug)]
pub(crate) struct Work<'a> {
    /// Where they come from, and where their entries count from. Sources take turns at every entry, so that
    /// what they write beside one another is written at one time.
    sources: Vec<Source<'a>>,
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

/// One of a work's sources, with its own part of the target.
#[derive(Clone, Debug)]
pub(crate) struct Source<'a> {
    /// Address to which its entries are added.
    pub address: u64,
    /// Address to which target entries are added.
    pub target: u64,
    /// As many as target entries.
    pub entries: Cow<'a, [u64]>,
}

impl<'a> Work<'a> {
    /// All of some loops that differ in their sources only, in pieces of at most `piece_bytes`.
    pub fn new(
        strided: &Strided,
        mut sources: Vec<Source<'a>>,
        mut target_entries: Cow<'a, [u64]>,
        piece_bytes: u64,
    ) -> Self {
        if let [source] = sources.as_mut_slice() {
            in_order(&mut source.entries, &mut target_entries, strided.num_bytes());
        }
        let table_bytes = extent(&target_entries);
        let dims = strided.looping();
        // What steps over the whole table goes around it, so that memory is walked in one direction.
        let around = dims.iter().take_while(|dim| dim.target_stride > table_bytes).count();
        let piece_bytes = piece_bytes.min(strided.run_bytes);
        let count = (target_entries.len() * sources.len()) as u64;
        let runs = Dim { count, source_stride: 0, target_stride: 0 };
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
            sources,
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
    pub fn single(strided: &Strided, address: u64, target: u64) -> Work<'static> {
        let source = Source { address, target, entries: Cow::Borrowed(&[0]) };
        Work::new(strided, vec![source], Cow::Borrowed(&[0]), u64::MAX)
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
        let targets = self.sources.iter().map(|source| source.target);
        let strides = self.levels.iter().map(|dim| dim.target_stride);
        let entries = self.target_entries.iter().copied();
        let bits =
            targets.chain(strides).chain(entries).fold(self.piece_bytes | 64, |bits, each| bits | each);
        1 << bits.trailing_zeros()
    }

    /// The first pieces, as many as begin within `bytes`, and the others.
    fn split(self, bytes: u64) -> (Self, Self) {
        let taken = bytes.div_ceil(self.piece_bytes.max(1));
        let at = self.pieces.start.saturating_add(taken).min(self.pieces.end);
        let later = Self { pieces: at..self.pieces.end, ..self.clone() };
        (Self { pieces: self.pieces.start..at, ..self }, later)
    }

    /// The addresses that an index of the entries' level adds: every entry of the first source, of the second
    /// and so on, before the next entry.
    fn entry(&self, index: u64) -> (u64, u64) {
        let (entry, source) = match self.sources.as_slice() {
            [one] => (as_index(index), one),
            several => (as_index(index) / several.len(), &several[as_index(index) % several.len()]),
        };
        (source.address + source.entries[entry], source.target + self.target_entries[entry])
    }

    /// The entries that the pieces are, where there is one source and each entry is one piece.
    pub fn single_pieces(&self) -> Option<SinglePieces<'_>> {
        let [source] = self.sources.as_slice() else { return None };
        let is_single = self.first_level == ROW_LEVEL && self.entries_level == ROW_LEVEL;
        let pieces = as_index(self.pieces.start)..as_index(self.pieces.end);
        is_single.then(|| SinglePieces {
            source: source.address,
            target: source.target,
            source_entries: &source.entries[pieces.clone()],
            target_entries: &self.target_entries[pieces],
        })
    }

    /// Walks the rows that the pieces make up.
    pub fn rows(&self) -> Rows<'_> {
        let mut rows = Rows { work: self, index: [0; MAX_LEVELS], source: 0, target: 0, left: 0 };
        rows.left = self.pieces.end - self.pieces.start;
        if rows.left == 0 {
            return rows;
        }
        let mut rest = self.pieces.start;
        let mut entry = 0;
        for level in (self.first_level..MAX_LEVELS).rev() {
            let dim = self.levels[level];
            rows.index[level] = rest % dim.count;
            rest /= dim.count;
            if level == self.entries_level {
                entry = rows.index[level];
            }
            rows.source += rows.index[level] * dim.source_stride;
            rows.target += rows.index[level] * dim.target_stride;
        }
        let (source, target) = self.entry(entry);
        rows.source += source;
        rows.target += target;
        rows
    }

    /// Pieces of a row, but for the first and last.
    pub fn row_pieces(&self) -> u64 {
        if self.has_rows() { self.levels[ROW_LEVEL].count } else { 1 }
    }

    /// Whether the last level steps by strides; entries are looked up one by one.
    fn has_rows(&self) -> bool {
        self.first_level < MAX_LEVELS && self.entries_level != ROW_LEVEL
    }

    fn has_pieces(&self) -> bool {
        self.piece_bytes != self.run_bytes
    }
}

/// Pieces that only a table tells apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SinglePieces<'a> {
    /// Address to which source entries are added.
    pub source: u64,
    /// Address to which target entries are added.
    pub target: u64,
    /// As many as target entries.
    pub source_entries: &'a [u64],
    /// One a piece.
    pub target_entries: &'a [u64],
}

/// Pieces at equal steps from one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    /// Address of the first.
    pub source: u64,
    /// Address of the first.
    pub target: u64,
    /// Bytes from one to the next.
    pub source_stride: u64,
    /// Bytes from one to the next.
    pub target_stride: u64,
    /// How many.
    pub pieces: u64,
    /// Bytes of each but the last.
    pub piece_bytes: u64,
    /// Bytes of the last.
    pub last_bytes: u64,
}

/// Walks the pieces of a work in the order of their targets, a row at a time.
#[derive(Clone, Debug)]
pub(crate) struct Rows<'a> {
    work: &'a Work<'a>,
    index: [u64; MAX_LEVELS],
    source: u64,
    target: u64,
    left: u64,
}

impl Iterator for Rows<'_> {
    type Item = Row;

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a row may be one piece, of which there may be millions")]
    fn next(&mut self) -> Option<Row> {
        if self.left == 0 {
            return None;
        }
        let work = self.work;
        let mut row = Row {
            source: self.source,
            target: self.target,
            source_stride: 0,
            target_stride: 0,
            pieces: 1,
            piece_bytes: work.piece_bytes,
            last_bytes: work.piece_bytes,
        };
        let mut above = MAX_LEVELS;
        if work.has_rows() {
            let dim = &work.levels[ROW_LEVEL];
            let begin = self.index[ROW_LEVEL];
            row.pieces = (dim.count - begin).min(self.left);
            (row.source_stride, row.target_stride) = (dim.source_stride, dim.target_stride);
            if work.has_pieces() && begin + row.pieces == dim.count {
                row.last_bytes = work.run_bytes - (dim.count - 1) * work.piece_bytes;
            }
            // Back to the row's first piece; the level above steps on.
            self.source = self.source.wrapping_sub(begin * dim.source_stride);
            self.target = self.target.wrapping_sub(begin * dim.target_stride);
            self.index[ROW_LEVEL] = 0;
            above = ROW_LEVEL;
        }
        self.left -= row.pieces;
        self.step(above);
        Some(row)
    }
}

impl Rows<'_> {
    /// Steps on at the level before `above`, and at those before it where that is through.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as above")]
    fn step(&mut self, above: usize) {
        let work = self.work;
        for level in (work.first_level..above).rev() {
            let dim = &work.levels[level];
            let at = self.index[level] + 1;
            let wraps = at == dim.count;
            self.index[level] = if wraps { 0 } else { at };
            // Addresses wrap around on purpose: entries need not ascend, and the last step goes back.
            if level == work.entries_level {
                let (from, to) = (work.entry(at - 1), work.entry(self.index[level]));
                self.source = self.source.wrapping_add(to.0.wrapping_sub(from.0));
                self.target = self.target.wrapping_add(to.1.wrapping_sub(from.1));
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
    }
}

#[expect(clippy::cast_possible_truncation, reason = "entries lie in memory, whose indices fit")]
fn as_index(entry: u64) -> usize {
    entry as usize
}

/// Puts entries into the order in which they are visited: that of the targets, which is theirs, unless only
/// the sources are dense. The side that is dense is then walked without leaps.
fn in_order(source: &mut Cow<'_, [u64]>, target: &mut Cow<'_, [u64]>, entry_bytes: u64) {
    let is_dense = |entries: &[u64]| extent(entries) / 2 <= entry_bytes.saturating_mul(entries.len() as u64);
    if is_dense(target) || !is_dense(source) {
        return;
    }
    let mut pairs: Vec<(u64, u64)> = source.iter().copied().zip(target.iter().copied()).collect();
    pairs.sort_unstable();
    let (sources, targets): (Vec<u64>, Vec<u64>) = pairs.into_iter().unzip();
    (*source, *target) = (Cow::Owned(sources), Cow::Owned(targets));
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
    use kvferry_core::moves::strided::each_step;
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
        let mut bytes = Vec::new();
        for row in work.iter().flat_map(Work::rows) {
            for piece in 0..row.pieces {
                let (source, target) =
                    (row.source + piece * row.source_stride, row.target + piece * row.target_stride);
                let num_bytes = if piece + 1 == row.pieces { row.last_bytes } else { row.piece_bytes };
                bytes.extend((0..num_bytes).map(|byte| (target + byte, source + byte)));
            }
        }
        bytes
    }

    proptest! {
        #[test]
        fn pieces_are_the_loops_bytes_however_they_are_cut(
            run_bytes in 1_u64..70,
            dims in dims(),
            targets in prop::collection::vec(0_u64..9000, 0..12),
            sources in prop::collection::vec((prop::collection::vec(0_u64..9000, 12), 0_u64..9000), 1..4),
            piece_bytes in 1_u64..40,
            parts in 1_usize..6,
        ) {
            let strided = Strided::new(run_bytes, dims.iter().copied()).unwrap();
            let source = |(index, (entries, target)): (usize, &'_ (Vec<u64>, u64))| Source {
                address: 10_000 * index as u64,
                target: *target,
                entries: entries[..targets.len()].to_vec().into(),
            };
            let from: Vec<Source<'_>> = sources.iter().enumerate().map(source).collect();
            let mut expected = Vec::new();
            for Source { address, target, entries } in &from {
                for (source_entry, target_entry) in entries.iter().zip(&targets) {
                    let (begin, end) = (address + source_entry, target + target_entry);
                    each_step(&strided.dims, begin, end, &mut |source, target| {
                        expected.extend((0..strided.run_bytes).map(|byte| (target + byte, source + byte)));
                    });
                }
            }
            let work = Work::new(&strided, from, (&targets).into(), piece_bytes);
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
