//! Columns: a schedule's fragments written straight into flat arrays, tens of millions at a time.
//!
//! What a loop moves for one table entry is the same pattern of runs every time, so it is worked out
//! once and added to each entry's offsets. Whether neighbours merge, and whether entries come out in
//! target order, is decided per entry and not per run. Tensors for which that cannot be said are
//! expanded run by run (as in [`expand`](crate::moves::expand)).

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;

use crate::error::Result;
use crate::moves::expand::{Fragment, MAX_RUNS, fragments_of, try_push};
use crate::moves::schedule::{BlockTable, CopyLoop, Schedule};
use crate::moves::strided::{Dim, Strided, each_step};

/// The five columns of descriptors, of equal length.
pub struct Columns<'a> {
    /// Index of the source tensor.
    pub source_tensor: &'a mut [MaybeUninit<i64>],
    /// Bytes from its first.
    pub source_offset: &'a mut [MaybeUninit<i64>],
    /// Index of the target tensor.
    pub target_tensor: &'a mut [MaybeUninit<i64>],
    /// Bytes from its first.
    pub target_offset: &'a mut [MaybeUninit<i64>],
    /// Bytes.
    pub length: &'a mut [MaybeUninit<i64>],
}

impl Columns<'_> {
    /// Fills what is the same for every run of a loop.
    fn fill_constants(&mut self, copy: &CopyLoop, range: Range<usize>) -> Range<usize> {
        fill(&mut self.source_tensor[range.clone()], copy.source_tensor as u64);
        fill(&mut self.target_tensor[range.clone()], copy.target_tensor as u64);
        fill(&mut self.length[range.clone()], copy.strided.run_bytes);
        range
    }
}

/// A schedule, ready to be written.
pub struct Expansion<'a> {
    schedule: &'a Schedule,
    parts: Vec<Part<'a>>,
    len: usize,
}

/// A loop with what it moves for one entry.
type Patterned<'a> = (&'a CopyLoop, Arc<Pattern>);

/// How the fragments of one target tensor are written.
enum Part<'a> {
    /// One loop, entry by entry.
    Orderly(Patterned<'a>),
    /// Several, whose entries take turns: which of them, and where on either side.
    Woven(Vec<Patterned<'a>>, Vec<(u64, u64, usize)>),
    /// Anything else, expanded already.
    Expanded(Vec<Fragment>),
}

/// What a loop moves for one table entry, and the dimensions that go around the whole table.
struct Pattern {
    around: Vec<Dim>,
    /// Bytes from an entry's first run to the end of its last, in source and target.
    ends: (u64, u64),
    /// Offsets of the runs from the entry's, in target order.
    source: Vec<u64>,
    target: Vec<u64>,
}

impl<'a> Expansion<'a> {
    /// Decides how each target tensor is written.
    pub fn new(schedule: &'a Schedule) -> Result<Self> {
        schedule.check_runs(MAX_RUNS)?;
        let mut patterns: HashMap<(Strided, Range<usize>), Option<Arc<Pattern>>> = HashMap::new();
        let same_target = |a: &CopyLoop, b: &CopyLoop| a.target_tensor == b.target_tensor;
        let mut parts = Vec::new();
        let mut len = 0;
        for loops in schedule.loops.chunk_by(same_target) {
            let mut pattern = |copy: &'a CopyLoop| {
                let found = patterns.entry((copy.strided, copy.entries.clone()));
                let pattern = found.or_insert_with(|| Pattern::orderly(copy, &schedule.table).map(Arc::new));
                pattern.clone().map(|pattern| (copy, pattern))
            };
            let orderly: Option<Vec<_>> = loops.iter().map(&mut pattern).collect();
            let woven = match orderly {
                Some(orderly) => Part::woven(orderly, &schedule.table)?,
                None => None,
            };
            let part = match woven {
                Some(part) => part,
                None => Part::Expanded(fragments_of(loops, &schedule.table)?),
            };
            len += part.len();
            parts.push(part);
        }
        Ok(Self { schedule, parts, len })
    }

    /// Fragments.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing moves.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The least length, zero where nothing moves.
    pub fn min_bytes(&self) -> u64 {
        let least = |part: &Part<'_>| match part {
            Part::Orderly((copy, _)) => Some(copy.strided.run_bytes),
            Part::Woven(loops, _) => loops.iter().map(|(copy, _)| copy.strided.run_bytes).min(),
            Part::Expanded(fragments) => fragments.iter().map(|fragment| fragment.length).min(),
        };
        self.parts.iter().filter_map(least).min().unwrap_or(0)
    }

    /// The greatest length, zero where nothing moves.
    pub fn max_bytes(&self) -> u64 {
        let most = |part: &Part<'_>| match part {
            Part::Orderly((copy, _)) => Some(copy.strided.run_bytes),
            Part::Woven(loops, _) => loops.iter().map(|(copy, _)| copy.strided.run_bytes).max(),
            Part::Expanded(fragments) => fragments.iter().map(|fragment| fragment.length).max(),
        };
        self.parts.iter().filter_map(most).max().unwrap_or(0)
    }

    /// Writes every fragment, sorted by target.
    ///
    /// # Panics
    ///
    /// If a column is shorter than [`Self::len`].
    pub fn write(&self, columns: &mut Columns<'_>) {
        let mut begin = 0;
        for part in &self.parts {
            let range = begin..begin + part.len();
            begin = range.end;
            match part {
                Part::Orderly((copy, pattern)) => {
                    let range = columns.fill_constants(copy, range);
                    let source = &mut columns.source_offset[range.clone()];
                    let target = &mut columns.target_offset[range];
                    pattern.write(copy, &self.schedule.table, source, target);
                }
                Part::Woven(loops, turns) => {
                    let mut at = range.start;
                    for (target, source, index) in turns {
                        let (copy, pattern) = &loops[*index];
                        let range = columns.fill_constants(copy, at..at + pattern.target.len());
                        at = range.end;
                        write_sums(&mut columns.source_offset[range.clone()], *source, &[0], &pattern.source);
                        write_sums(&mut columns.target_offset[range], *target, &[0], &pattern.target);
                    }
                }
                Part::Expanded(fragments) => {
                    for (index, fragment) in range.zip(fragments) {
                        columns.source_tensor[index].write((fragment.source_tensor as u64).cast_signed());
                        columns.source_offset[index].write(fragment.source_offset.cast_signed());
                        columns.target_tensor[index].write((fragment.target_tensor as u64).cast_signed());
                        columns.target_offset[index].write(fragment.target_offset.cast_signed());
                        columns.length[index].write(fragment.length.cast_signed());
                    }
                }
            }
        }
    }
}

impl<'a> Part<'a> {
    /// Loops that are orderly each by itself, if they are so together.
    #[expect(clippy::stable_sort_primitive, reason = "it is the faster one on sorted stretches")]
    fn woven(mut loops: Vec<Patterned<'a>>, table: &BlockTable) -> Result<Option<Self>> {
        if loops.len() == 1 {
            return Ok(loops.pop().map(Self::Orderly));
        }
        let mut turns = Vec::new();
        for (index, (copy, pattern)) in loops.iter().enumerate() {
            let entries = table.source[copy.entries.clone()].iter().zip(&table.target[copy.entries.clone()]);
            let mut pushed = Ok(());
            each_step(&pattern.around, copy.source_offset, copy.target_offset, &mut |source, target| {
                for (s, t) in entries.clone() {
                    if pushed.is_ok() {
                        pushed = try_push(&mut turns, (target + t, source + s, index));
                    }
                }
            });
            pushed?;
        }
        turns.sort(); // the stable sort merges the sorted stretches that it finds
        let follows = |pair: &[(u64, u64, usize)]| {
            let ((target, source, index), (next_target, next_source, next)) = (pair[0], pair[1]);
            let ends = loops[index].1.ends;
            let end = (source + ends.0, target + ends.1);
            end.1 <= next_target
                && (end != (next_source, next_target)
                    || loops[index].0.source_tensor != loops[next].0.source_tensor)
        };
        Ok(turns.windows(2).all(follows).then_some(Self::Woven(loops, turns)))
    }

    fn len(&self) -> usize {
        match self {
            Self::Orderly((copy, pattern)) => {
                let around: u64 = pattern.around.iter().map(|dim| dim.count).product();
                // `check_runs` bounds the product.
                usize::try_from(around).unwrap_or(usize::MAX) * copy.entries.len() * pattern.target.len()
            }
            Self::Woven(loops, turns) => turns.iter().map(|(_, _, index)| loops[*index].1.target.len()).sum(),
            Self::Expanded(fragments) => fragments.len(),
        }
    }
}

impl Pattern {
    /// The pattern of a loop whose runs come out in target order, none of which continues another;
    /// `None` where they do not.
    fn orderly(copy: &CopyLoop, table: &BlockTable) -> Option<Self> {
        let targets = &table.target[copy.entries.clone()];
        let sources = &table.source[copy.entries.clone()];
        let table_bytes = targets.last()?.checked_sub(*targets.first()?)?;
        let dims = copy.strided.looping();
        let split = dims.iter().take_while(|dim| dim.target_stride > table_bytes).count();
        let (around, inner) = dims.split_at(split);
        let mut pattern =
            Self { around: around.to_vec(), ends: (0, 0), source: Vec::new(), target: Vec::new() };
        each_step(inner, 0, 0, &mut |source, target| {
            pattern.source.push(source);
            pattern.target.push(target);
        });
        let run_bytes = copy.strided.run_bytes;
        let runs = pattern.source.iter().zip(&pattern.target);
        if !follow(runs.clone().map(|(source, target)| (*source, *target)), run_bytes) {
            return None;
        }
        // An entry begins with the pattern's first run, which has offset zero, and ends with its last.
        let ends = (*pattern.source.last()? + run_bytes, *pattern.target.last()? + run_bytes);
        pattern.ends = ends;
        let apart = |a: (u64, u64), b: (u64, u64)| is_after((a.0 + ends.0, a.1 + ends.1), b);
        let entries = || sources.iter().copied().zip(targets.iter().copied());
        if !entries().zip(entries().skip(1)).all(|(a, b)| apart(a, b)) {
            return None;
        }
        let (first, last) = (entries().next()?, entries().next_back()?);
        let mut end = last;
        for dim in around.iter().rev() {
            // From the end of one step, the inner dimensions run through, to the start of the next.
            if !apart(end, (first.0 + dim.source_stride, first.1 + dim.target_stride)) {
                return None;
            }
            end.0 += (dim.count - 1) * dim.source_stride;
            end.1 += (dim.count - 1) * dim.target_stride;
        }
        Some(pattern)
    }

    fn write(
        &self,
        copy: &CopyLoop,
        table: &BlockTable,
        source_column: &mut [MaybeUninit<i64>],
        target_column: &mut [MaybeUninit<i64>],
    ) {
        let (sources, targets) = (&table.source[copy.entries.clone()], &table.target[copy.entries.clone()]);
        let mut at = 0;
        each_step(&self.around, copy.source_offset, copy.target_offset, &mut |source, target| {
            let range = at..at + targets.len() * self.target.len();
            at = range.end;
            write_sums(&mut source_column[range.clone()], source, sources, &self.source);
            write_sums(&mut target_column[range], target, targets, &self.target);
        });
    }
}

/// Whether each run lies behind the one before it in the target, and does not continue it.
fn follow(runs: impl Iterator<Item = (u64, u64)> + Clone, run_bytes: u64) -> bool {
    runs.clone().zip(runs.skip(1)).all(|(a, b)| is_after((a.0 + run_bytes, a.1 + run_bytes), b))
}

/// Whether a run begins behind an end in the target, and not at it on both sides.
fn is_after(end: (u64, u64), begin: (u64, u64)) -> bool {
    end.1 <= begin.1 && end != begin
}

/// Writes `base + entry + offset` for every entry and, within it, every offset.
fn write_sums(column: &mut [MaybeUninit<i64>], base: u64, entries: &[u64], offsets: &[u64]) {
    if let [offset] = offsets {
        for (cell, entry) in column.iter_mut().zip(entries) {
            cell.write((base + entry + offset).cast_signed());
        }
        return;
    }
    for (cells, entry) in column.chunks_exact_mut(offsets.len()).zip(entries) {
        let start = base + entry;
        for (cell, offset) in cells.iter_mut().zip(offsets) {
            cell.write((start + offset).cast_signed());
        }
    }
}

fn fill(column: &mut [MaybeUninit<i64>], value: u64) {
    for cell in column {
        cell.write(value.cast_signed());
    }
}
