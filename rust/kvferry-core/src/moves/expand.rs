//! Expansion: copy loops become flat descriptors, merged wherever both sides are contiguous.

use crate::error::{Result, fail};
use crate::moves::schedule::{BlockTable, CopyLoop, Schedule};
use crate::moves::strided::each_step;

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

/// Bound on the runs that are expanded: a transport would take minutes for so many. What memory they
/// need is asked for step by step, so that its lack is an error and not the end of the process.
pub const MAX_RUNS: u64 = 1 << 28;
/// Items by which a list grows at first.
const FIRST_ITEMS: usize = 1 << 10;

/// Appends an item, if there is memory for it.
pub(crate) fn try_push<T>(items: &mut Vec<T>, item: T) -> Result<()> {
    if items.len() == items.capacity() {
        let more = items.len().max(FIRST_ITEMS);
        if items.try_reserve_exact(more).is_err() {
            let bytes = (items.len() + more) * size_of::<T>();
            fail!(Memory, "expanding a copy needs another {bytes} bytes");
        }
    }
    items.push(item);
    Ok(())
}

/// The fragments of a schedule, sorted by target and as few as can be.
pub fn fragments(schedule: &Schedule) -> Result<Vec<Fragment>> {
    schedule.check_runs(MAX_RUNS)?;
    let same_target = |a: &CopyLoop, b: &CopyLoop| a.target_tensor == b.target_tensor;
    let mut all = Vec::new();
    for loops in schedule.loops.chunk_by(same_target) {
        for fragment in fragments_of(loops, &schedule.table)? {
            try_push(&mut all, fragment)?;
        }
    }
    Ok(all)
}

/// The fragments of one target tensor's loops.
pub(crate) fn fragments_of(loops: &[CopyLoop], table: &BlockTable) -> Result<Vec<Fragment>> {
    let mut fragments = Vec::new();
    for copy in loops {
        expand(copy, table, &mut fragments)?;
    }
    if !fragments.is_sorted() {
        fragments.sort_unstable();
        coalesce(&mut fragments);
    }
    Ok(fragments)
}

/// Merges neighbours of a sorted list that are contiguous on both sides.
pub fn coalesce(fragments: &mut Vec<Fragment>) {
    fragments.dedup_by(|next, last| {
        let continues = last.continues_in(next);
        if continues {
            last.length += next.length;
        }
        continues
    });
}

fn push(fragments: &mut Vec<Fragment>, next: Fragment) -> Result<()> {
    match fragments.last_mut() {
        Some(last) if last.continues_in(&next) => {
            last.length += next.length;
            Ok(())
        }
        _ => try_push(fragments, next),
    }
}

/// Expands one loop. Dimensions that step over the whole table go around it and the others inside,
/// so that fragments come out in target order wherever the tensor's strides allow it.
fn expand(copy: &CopyLoop, table: &BlockTable, out: &mut Vec<Fragment>) -> Result<()> {
    let entries = copy.entries.clone();
    let (sources, targets) = (&table.source[entries.clone()], &table.target[entries]);
    let (Some(first), Some(last)) = (targets.first(), targets.last()) else { return Ok(()) };
    let table_bytes = last - first;
    let dims = copy.strided.looping();
    let around = dims.iter().take_while(|dim| dim.target_stride > table_bytes).count();
    let (outer, inner) = dims.split_at(around);
    let mut pushed = Ok(());
    each_step(outer, copy.source_offset, copy.target_offset, &mut |source, target| {
        for (source_entry, target_entry) in sources.iter().zip(targets) {
            each_step(inner, source + source_entry, target + target_entry, &mut |source, target| {
                let next = Fragment {
                    target_tensor: copy.target_tensor,
                    target_offset: target,
                    source_tensor: copy.source_tensor,
                    source_offset: source,
                    length: copy.strided.run_bytes,
                };
                if pushed.is_ok() {
                    pushed = push(out, next);
                }
            });
        }
    });
    pushed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moves::strided::{Dim, Strided};

    #[test]
    fn runs_are_counted_against_the_bound() {
        let dim = Dim { count: 3, source_stride: 8, target_stride: 9 };
        let strided = Strided::new(4, [dim]).unwrap();
        let (source_offset, target_offset) = (0, 0);
        let copy = CopyLoop {
            source_tensor: 0,
            target_tensor: 0,
            source_offset,
            target_offset,
            strided,
            entries: 0..2,
        };
        let table = BlockTable { source: vec![0, 100], target: vec![0, 100] };
        let schedule = Schedule { loops: vec![copy], table };
        assert!(schedule.check_runs(6).is_ok());
        assert!(schedule.check_runs(5).is_err());
        assert_eq!(fragments(&schedule).unwrap().len(), 6);
    }
}
