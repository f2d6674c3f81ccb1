//! Expansion: copy loops become flat descriptors, merged wherever both sides are contiguous.

use crate::bind::Schedule;
use crate::error::{Result, fail};
use crate::strided::{BlockTable, CopyLoop, Dim};

/// A contiguous move between two tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fragment {
    /// Index of the target rank's tensor.
    pub target_tensor: usize,
    /// Bytes from its first.
    pub target_offset: u64,
    /// Index of the source rank's tensor.
    pub source_tensor: usize,
    /// Bytes from its first.
    pub source_offset: u64,
    /// Bytes.
    pub length: u64,
}

impl Fragment {
    /// Whether `next` continues `self` on both sides.
    fn continues_in(&self, next: &Self) -> bool {
        (self.source_tensor, self.target_tensor) == (next.source_tensor, next.target_tensor)
            && self.target_offset + self.length == next.target_offset
            && self.source_offset + self.length == next.source_offset
    }
}

/// Bound on the runs that are expanded, so that no description of a peer's can exhaust memory: a
/// [`Fragment`] takes 40 bytes, and a transport would take minutes for so many.
pub const MAX_RUNS: u64 = 1 << 28;

/// Refuses a schedule that expands to more than [`MAX_RUNS`].
pub(crate) fn check_runs(schedule: &Schedule) -> Result<()> {
    let runs = |copy: &CopyLoop| u128::from(copy.strided.runs()) * copy.entries.len() as u128;
    let total: u128 = schedule.loops.iter().map(runs).sum();
    if total > u128::from(MAX_RUNS) {
        fail!(Value, "the plan expands to {total} contiguous runs, more than {MAX_RUNS}");
    }
    Ok(())
}

/// The fragments of a schedule, sorted by target and as few as can be.
pub fn fragments(schedule: &Schedule) -> Result<Vec<Fragment>> {
    check_runs(schedule)?;
    let same_target = |a: &CopyLoop, b: &CopyLoop| a.target_tensor == b.target_tensor;
    let by_target = schedule.loops.chunk_by(same_target);
    Ok(by_target.flat_map(|loops| fragments_of(loops, &schedule.table)).collect())
}

/// The fragments of one target tensor's loops.
pub(crate) fn fragments_of(loops: &[CopyLoop], table: &BlockTable) -> Vec<Fragment> {
    let mut fragments = Vec::new();
    for copy in loops {
        expand(copy, table, &mut fragments);
    }
    if !fragments.is_sorted() {
        fragments.sort(); // stable, and so fast on the sorted stretches that loops produce
        fragments = coalesce(fragments);
    }
    fragments
}

/// Merges neighbours of a sorted list that are contiguous on both sides.
pub fn coalesce(fragments: Vec<Fragment>) -> Vec<Fragment> {
    let mut merged = Vec::with_capacity(fragments.len());
    for fragment in fragments {
        push(&mut merged, fragment);
    }
    merged
}

fn push(fragments: &mut Vec<Fragment>, next: Fragment) {
    match fragments.last_mut() {
        Some(last) if last.continues_in(&next) => last.length += next.length,
        _ => fragments.push(next),
    }
}

/// Expands one loop. Dimensions that step over the whole table go around it and the others inside,
/// so that fragments come out in target order wherever the tensor's strides allow it.
fn expand(copy: &CopyLoop, table: &BlockTable, out: &mut Vec<Fragment>) {
    let entries = copy.entries.clone();
    let (sources, targets) = (&table.source[entries.clone()], &table.target[entries]);
    let (Some(first), Some(last)) = (targets.first(), targets.last()) else { return };
    let table_bytes = last - first;
    let dims = copy.strided.looping();
    let around = dims.iter().take_while(|dim| dim.target_stride > table_bytes).count();
    let (outer, inner) = dims.split_at(around);
    each_step(outer, copy.source_offset, copy.target_offset, &mut |source, target| {
        for (source_entry, target_entry) in sources.iter().zip(targets) {
            each_step(inner, source + source_entry, target + target_entry, &mut |source, target| {
                push(
                    out,
                    Fragment {
                        target_tensor: copy.target_tensor,
                        target_offset: target,
                        source_tensor: copy.source_tensor,
                        source_offset: source,
                        length: copy.strided.run_bytes,
                    },
                );
            });
        }
    });
}

/// Calls `visit` with the offsets of every index of `dims`, the last one fastest.
pub fn each_step(dims: &[Dim], source: u64, target: u64, visit: &mut impl FnMut(u64, u64)) {
    let Some((dim, inner)) = dims.split_first() else {
        return visit(source, target);
    };
    for step in 0..dim.count {
        each_step(inner, source + step * dim.source_stride, target + step * dim.target_stride, visit);
    }
}
