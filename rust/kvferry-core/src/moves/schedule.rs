//! Schedules: copy loops over a block table, the one form in which a plan is executed, expanded and
//! explained.

use std::ops::Range;

use crate::error::{Result, fail};
use crate::memory::region::Region;
use crate::moves::strided::{Dim, Strided};

/// Everything that one rank pair of a plan moves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// The loops, by target tensor.
    pub loops: Vec<CopyLoop>,
    /// The entries that they repeat over.
    pub table: BlockTable,
}

impl Schedule {
    /// Payload bytes.
    pub fn num_bytes(&self) -> u64 {
        let bytes = |copy: &CopyLoop| copy.strided.num_bytes() * copy.entries.len() as u64;
        self.loops.iter().map(bytes).sum()
    }

    /// Refuses to write what is read-only; `target` is the memory of the target tensors.
    pub fn check_writable(&self, target: &[Region]) -> Result<()> {
        let written = self.loops.iter().map(|copy| &target[copy.target_tensor]);
        match written.into_iter().find(|region| !region.writable) {
            Some(Region { name, .. }) => {
                fail!(Layout, "{name} is read-only, it cannot be a target; pass a writable one")
            }
            None => Ok(()),
        }
    }

    /// Refuses a schedule that expands to more than `most` runs.
    pub(crate) fn check_runs(&self, most: u64) -> Result<()> {
        let runs = |copy: &CopyLoop| u128::from(copy.strided.runs()) * copy.entries.len() as u128;
        let total: u128 = self.loops.iter().map(runs).sum();
        if total > u128::from(most) {
            fail!(Value, "the plan expands to {total} contiguous runs, more than {most}");
        }
        Ok(())
    }
}

/// One strided copy, repeated for every entry of a slice of the block table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyLoop {
    /// Index of the source rank's tensor.
    pub source_tensor: usize,
    /// Index of the target rank's tensor.
    pub target_tensor: usize,
    /// Bytes from the source tensor's first, before the table's.
    pub source_offset: u64,
    /// Bytes from the target tensor's first, before the table's.
    pub target_offset: u64,
    /// What is copied there.
    pub strided: Strided,
    /// Entries of the [`BlockTable`].
    pub entries: Range<usize>,
}

impl CopyLoop {
    /// Whether both differ in nothing but their offsets.
    fn repeats(&self, other: &Self) -> bool {
        (self.source_tensor, self.target_tensor) == (other.source_tensor, other.target_tensor)
            && self.strided == other.strided
            && self.entries == other.entries
    }

    /// Steps in bytes from `self` to `next` where those are forward on both sides.
    fn step_to(&self, next: &Self) -> Option<(u64, u64)> {
        let source = next.source_offset.checked_sub(self.source_offset)?;
        let target = next.target_offset.checked_sub(self.target_offset)?;
        (source > 0 && target > 0).then_some((source, target))
    }
}

/// Byte offsets of blocks: entry `e` is one piece of a block on either side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockTable {
    /// Bytes from the source tensor's first.
    pub source: Vec<u64>,
    /// Bytes from the target tensor's first.
    pub target: Vec<u64>,
}

/// Folds loops that repeat each other at equal steps into one with a dimension more: the planes of a
/// tensor that holds both, the layers of a tensor that holds several.
pub fn fold(mut loops: Vec<CopyLoop>) -> Vec<CopyLoop> {
    loop {
        // Loops that may repeat each other become neighbours; the stable sort keeps their order.
        let ends = |copy: &CopyLoop| (copy.target_tensor, copy.source_tensor, copy.entries.start);
        loops.sort_by(|a, b| ends(a).cmp(&ends(b)).then_with(|| a.strided.cmp(&b.strided)));
        let folded = fold_once(&loops);
        if folded.len() == loops.len() {
            return loops;
        }
        loops = folded;
    }
}

fn fold_once(loops: &[CopyLoop]) -> Vec<CopyLoop> {
    let mut folded = Vec::with_capacity(loops.len());
    let mut rest = loops;
    while let [first, after @ ..] = rest {
        let step = after.first().filter(|next| first.repeats(next)).and_then(|next| first.step_to(next));
        let repeated = step.and_then(|step| {
            let next =
                |pair: &&[CopyLoop]| pair[0].repeats(&pair[1]) && pair[0].step_to(&pair[1]) == Some(step);
            let count = 1 + rest.windows(2).take_while(next).count();
            let dim = Dim { count: count as u64, source_stride: step.0, target_stride: step.1 };
            let dims = first.strided.dims.into_iter().chain([dim]);
            Some((count, Strided::new(first.strided.run_bytes, dims)?))
        });
        if let Some((count, strided)) = repeated {
            folded.push(CopyLoop { strided, ..first.clone() });
            rest = &rest[count..];
        } else {
            folded.push(first.clone());
            rest = after;
        }
    }
    folded
}
