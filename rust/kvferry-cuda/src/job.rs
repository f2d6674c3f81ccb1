//! Jobs: copy loops as one launch executes them, with vectors chosen and tiles numbered.

use std::ops::Range;

use kvferry_core::moves::schedule::{BlockTable, CopyLoop, Schedule};
use kvferry_core::moves::strided::{Dim, Strided, each_step};
use kvferry_core::{Error, Result};

use crate::ranges::Ranges;
use crate::records::{self, CopyLoops, CopyRuns, Divisor, Entry, Loop, Run, narrow};

/// Threads of a block, and vectors that each holds at once, as `block.cuh` declares them.
pub const DEVICE_THREADS: u32 = 256;
const UNROLL: u64 = 4;
/// Bytes of the widest vector.
pub const WIDEST_BYTES: u64 = 16;
/// Bound on the loops of a launch, and on its single runs: some 200 and 32 MiB of records.
const MAX_RECORDS: u64 = 1 << 20;
/// Runs up to which a loop is taken run by run, which needs fewer bytes than to describe the loop.
const FEW_RUNS: u64 = 4;
/// Vectors so narrow that a loop of long runs is faster run by run, where both ends of a run allow wide
/// vectors but for its first and last bytes.
const NARROW_BYTES: u64 = 4;
/// Bytes of a long run: single bytes at its ends are then few.
const LONG_RUN_BYTES: u64 = 1024;

/// What one launch of each kernel copies.
#[derive(Clone, Debug)]
pub struct Job {
    /// Threads of a block.
    threads: u64,
    pub loops: Vec<Loop>,
    pub table: Vec<Entry>,
    pub runs: Vec<Run>,
    pub loop_tiles: u64,
    pub run_tiles: u64,
}

/// Entries of a job's table, with what is the same for every loop over them.
#[derive(Clone, Debug)]
pub struct Entries {
    range: Range<usize>,
    /// Bits that are set in some offset.
    bits: u64,
    /// Bits that are set in some difference between source and target.
    differing: u64,
}

/// Bytes of the widest vector that divides whatever has some of these bits set.
pub fn vector_bytes(bits: u64) -> u64 {
    1 << (bits | WIDEST_BYTES).trailing_zeros()
}

/// Bits that are set in some number of bytes by which `strided` steps, or in its run.
pub fn step_bits(strided: &Strided) -> u64 {
    let dims = strided.looping().iter();
    dims.fold(strided.run_bytes, |bits, dim| bits | dim.source_stride | dim.target_stride)
}

impl Job {
    /// Nothing yet, for blocks of so many threads.
    pub fn new(threads: u32) -> Self {
        let (loops, table, runs) = (Vec::new(), Vec::new(), Vec::new());
        Self { threads: u64::from(threads), loops, table, runs, loop_tiles: 0, run_tiles: 0 }
    }

    /// Adds those loops of a schedule for which `tensors` gives the addresses of source and target.
    pub fn push_schedule(
        &mut self,
        schedule: &Schedule,
        mut tensors: impl FnMut(&CopyLoop) -> Result<Option<(u64, u64)>>,
    ) -> Result<()> {
        let mut table = None;
        let mut known = Ranges::default();
        self.loops.reserve(schedule.loops.len());
        for copy in &schedule.loops {
            let Some((source, target)) = tensors(copy)? else { continue };
            let first = *table.get_or_insert_with(|| self.push_table(&schedule.table));
            let Range { start, end } = copy.entries;
            let entries = known.of(start..end, || self.entries(first + start..first + end));
            self.push(&copy.strided, source + copy.source_offset, target + copy.target_offset, &entries)?;
        }
        Ok(())
    }

    /// Adds a block table; its first entry's index.
    pub fn push_table(&mut self, table: &BlockTable) -> usize {
        let first = self.table.len();
        let entries = table.source.iter().zip(&table.target);
        self.table.extend(entries.map(|(&source, &target)| Entry { source, target }));
        first
    }

    /// Some entries of the job's table.
    pub fn entries(&self, range: Range<usize>) -> Entries {
        let (mut bits, mut differing) = (0, 0);
        for entry in &self.table[range.clone()] {
            bits |= entry.source | entry.target;
            differing |= entry.source.wrapping_sub(entry.target);
        }
        Entries { range, bits, differing }
    }

    /// Adds a loop between two addresses, to which the entries are added.
    pub fn push(&mut self, strided: &Strided, source: u64, target: u64, entries: &Entries) -> Result<()> {
        let runs = runs(strided).and_then(|runs| runs.checked_mul(entries.range.len() as u64));
        let bytes = runs.and_then(|runs| runs.checked_mul(strided.run_bytes));
        let (Some(runs), Some(_)) = (runs, bytes.filter(|bytes| i64::try_from(*bytes).is_ok())) else {
            return Err(Error::Value("a copy of more than 2^63 bytes".to_owned()));
        };
        if runs == 0 || strided.run_bytes == 0 {
            return Ok(());
        }
        let vector_bytes = vector_bytes(source | target | entries.bits | step_bits(strided));
        let fits = self.runs.len() as u64 + runs <= MAX_RECORDS;
        if fits && (runs <= FEW_RUNS || is_better_run_by_run(strided, source, target, entries, vector_bytes))
        {
            self.push_runs(strided, source, target, entries);
            return Ok(());
        }
        self.push_loop(strided, source, target, entries, vector_bytes)
    }

    /// What the loop kernel is called with where the job's records lie there.
    pub fn copy_loops(&self, loops: u64, table: u64) -> CopyLoops {
        CopyLoops { loops, table, num_tiles: self.loop_tiles, num_loops: narrow(self.loops.len() as u64) }
    }

    /// What the run kernel is called with where the job's records lie there.
    pub fn copy_runs(&self, runs: u64) -> CopyRuns {
        CopyRuns { runs, num_tiles: self.run_tiles, num_runs: narrow(self.runs.len() as u64) }
    }

    fn push_loop(
        &mut self,
        strided: &Strided,
        source: u64,
        target: u64,
        entries: &Entries,
        vector_bytes: u64,
    ) -> Result<()> {
        if let Some((first, shift, rest)) = halves(strided, vector_bytes) {
            self.push_loop(&first, source, target, entries, vector_bytes)?;
            return self.push_loop(&rest, source + shift.0, target + shift.1, entries, vector_bytes);
        }
        if self.loops.len() as u64 == MAX_RECORDS {
            return Err(Error::Value(format!("a copy of more than {MAX_RECORDS} loops")));
        }
        let num_vectors = strided.num_bytes() / vector_bytes * entries.range.len() as u64;
        self.loops.push(Loop {
            source,
            target,
            first_entry: entries.range.start as u64,
            first_tile: self.loop_tiles,
            num_vectors,
            vector_bytes: narrow(vector_bytes),
            entry_runs: Divisor::new(strided.runs()),
            strided: records::Strided::new(strided, vector_bytes),
        });
        self.loop_tiles += num_vectors.div_ceil(self.threads * UNROLL);
        Ok(())
    }

    fn push_runs(&mut self, strided: &Strided, source: u64, target: u64, entries: &Entries) {
        let tile_bytes = self.threads * UNROLL * WIDEST_BYTES;
        let Self { table, runs, run_tiles, .. } = self;
        for entry in &table[entries.range.clone()] {
            let (source, target) = (source + entry.source, target + entry.target);
            each_step(strided.looping(), source, target, &mut |source, target| {
                let num_bytes = strided.run_bytes;
                runs.push(Run { source, target, num_bytes, first_tile: *run_tiles });
                // Tiles begin at multiples of the widest vector in the target.
                *run_tiles += (target % WIDEST_BYTES + num_bytes).div_ceil(tile_bytes);
            });
        }
    }
}

/// Runs of all dimensions, where that is a number.
fn runs(strided: &Strided) -> Option<u64> {
    strided.dims.iter().try_fold(1_u64, |runs, dim| runs.checked_mul(dim.count))
}

fn is_better_run_by_run(
    strided: &Strided,
    source: u64,
    target: u64,
    entries: &Entries,
    loop_vector_bytes: u64,
) -> bool {
    let steps = strided.looping().iter().map(|dim| dim.source_stride.wrapping_sub(dim.target_stride));
    let differing = steps.fold(source.wrapping_sub(target) | entries.differing, |bits, step| bits | step);
    loop_vector_bytes <= NARROW_BYTES
        && strided.run_bytes >= LONG_RUN_BYTES
        && vector_bytes(differing) > loop_vector_bytes
}

/// Two loops in place of one whose numbers are too large for a kernel, and by how much the second is shifted.
fn halves(strided: &Strided, vector_bytes: u64) -> Option<(Strided, (u64, u64), Strided)> {
    let (mut first, mut rest) = (*strided, *strided);
    if strided.runs() > Divisor::MAX {
        let outermost = strided.dims.len() - strided.looping().len();
        let Dim { count, source_stride, target_stride } = strided.dims[outermost];
        let half = count / 2;
        first.dims[outermost].count = half;
        rest.dims[outermost].count = count - half;
        return Some((first, (half * source_stride, half * target_stride), rest));
    }
    if strided.run_bytes / vector_bytes > Divisor::MAX {
        first.run_bytes = Divisor::MAX * vector_bytes;
        rest.run_bytes = strided.run_bytes - first.run_bytes;
        return Some((first, (first.run_bytes, first.run_bytes), rest));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const TILE_VECTORS: u64 = DEVICE_THREADS as u64 * UNROLL;

    fn strided(run_bytes: u64, dims: &[(u64, u64, u64)]) -> Strided {
        let dim = |&(count, source_stride, target_stride): &_| Dim { count, source_stride, target_stride };
        Strided::new(run_bytes, dims.iter().map(dim)).unwrap()
    }

    fn job(strided: &Strided, source: u64, target: u64, entries: &[(u64, u64)]) -> Result<Job> {
        let (source_entries, target_entries) = entries.iter().copied().unzip();
        let mut job = Job::new(DEVICE_THREADS);
        job.push_table(&BlockTable { source: source_entries, target: target_entries });
        let entries = job.entries(0..entries.len());
        job.push(strided, source, target, &entries)?;
        Ok(job)
    }

    fn widths(strided: &Strided, source: u64, target: u64, entries: &[(u64, u64)]) -> Vec<u32> {
        let many: Vec<_> = entries.iter().cycle().take(9).copied().collect();
        job(strided, source, target, &many).unwrap().loops.iter().map(|copy| copy.vector_bytes).collect()
    }

    #[test]
    fn vectors_are_as_wide_as_everything_allows() {
        let heads = strided(256, &[(16, 4096, 512)]);
        assert_eq!(widths(&heads, 0x1000, 0x2000, &[(0, 64)]), [16]);
        assert_eq!(widths(&heads, 0x1008, 0x2000, &[(0, 64)]), [8]);
        assert_eq!(widths(&heads, 0x1000, 0x2004, &[(0, 64)]), [4]);
        assert_eq!(widths(&heads, 0x1000, 0x2000, &[(0, 64), (2, 0)]), [2]);
        assert_eq!(widths(&strided(255, &[(16, 4096, 512)]), 0, 0, &[(0, 0)]), [1]);
        assert_eq!(widths(&strided(256, &[(16, 4096, 520)]), 0, 0, &[(0, 0)]), [8]);
    }

    #[test]
    fn few_runs_and_long_ones_with_odd_ends_go_run_by_run() {
        let few = job(&strided(100, &[(2, 200, 100)]), 1, 2, &[(0, 0), (1000, 2000)]).unwrap();
        assert!(few.loops.is_empty());
        let ends: Vec<_> = few.runs.iter().map(|run| (run.source, run.target, run.num_bytes)).collect();
        assert_eq!(
            ends,
            [(1, 2, 200), (1001, 2002, 200)]
                .map(|run| (run.0, run.1, run.2 / 2))
                .into_iter()
                .flat_map(|run| [run, (run.0 + 200, run.1 + 100, run.2)])
                .collect::<Vec<_>>()
        );

        let table: Vec<_> = (0..9).map(|entry| (entry * 8192, entry * 4096)).collect();
        let odd_ends = job(&strided(4000, &[]), 4, 20, &table).unwrap();
        assert_eq!((odd_ends.loops.len(), odd_ends.runs.len()), (0, 9));
        let apart = job(&strided(4000, &[]), 4, 8, &table).unwrap();
        assert_eq!((apart.loops.len(), apart.runs.len()), (1, 0));
    }

    #[test]
    fn tiles_are_numbered_through_all_loops() {
        let mut job = Job::new(DEVICE_THREADS);
        job.push_table(&BlockTable { source: vec![0; 5], target: (0..5).map(|e| e << 20).collect() });
        let entries = job.entries(0..5);
        for address in [0, 1 << 40] {
            job.push(&strided(16 * TILE_VECTORS, &[]), 0, address, &entries).unwrap();
            job.push(&strided(16, &[]), 0, address + (1 << 39), &entries).unwrap();
        }
        let first_tiles: Vec<u64> = job.loops.iter().map(|copy| copy.first_tile).collect();
        assert_eq!(first_tiles, [0, 5, 6, 11]);
        assert_eq!(job.loop_tiles, 12);
    }

    #[test]
    fn what_exceeds_32_bits_is_cut_into_loops_that_do_not() {
        let table: Vec<_> = (0..8).map(|entry| (entry << 45, entry << 46)).collect();
        let long_run = job(&strided((5 << 30) + 1, &[]), 0, 1, &table).unwrap();
        assert_eq!(long_run.runs.len(), 0);
        let vectors: u64 = long_run.loops.iter().map(|copy| copy.num_vectors).sum();
        assert_eq!((long_run.loops.len(), vectors), (6, 8 * ((5 << 30) + 1)));
        assert_eq!(long_run.loops[5].target, 1 + (5 << 30));

        let many_runs =
            job(&strided(16, &[(3 << 20, 1 << 25, 1 << 24), (1 << 10, 64, 32)]), 0, 0, &table).unwrap();
        let vectors: u64 = many_runs.loops.iter().map(|copy| copy.num_vectors).sum();
        assert_eq!((many_runs.loops.len(), vectors), (4, 8 * (3 << 30)));
        assert_eq!(many_runs.loops[2].source, (3 << 19) << 25);
    }

    #[test]
    fn what_exceeds_any_memory_is_refused() {
        let dims = [(1 << 20, 0, 1 << 42), (1 << 20, 0, 1 << 21), (1 << 20, 0, 2)];
        assert!(matches!(job(&strided(1, &dims), 0, 0, &[(0, 0); 16]), Err(Error::Value(_))));
        assert!(matches!(job(&strided(1 << 62, &[]), 0, 0, &[(0, 0); 9]), Err(Error::Value(_))));
    }

    #[test]
    fn nothing_is_nothing() {
        assert_eq!(job(&strided(16, &[]), 0, 0, &[]).unwrap().run_tiles, 0);
        assert_eq!(job(&strided(0, &[(9, 1, 1)]), 0, 0, &[(0, 0)]).unwrap().loop_tiles, 0);
    }
}
