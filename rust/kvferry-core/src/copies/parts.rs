//! Parts: what is copied alike for every pair of blocks, put together into a schedule.

use std::collections::HashMap;

use crate::error::{Result, fail};
use crate::moves::schedule::{BlockTable, CopyLoop, Schedule, fold};
use crate::moves::strided::{Dim, MAX_DIMS, Strided};

/// Bound on the loops into which a part's dimensions may break up. A loop carries [`MAX_DIMS`] of them,
/// and tensors with two more of any length are not known.
const MAX_LOOPS: u64 = 1 << 16;

/// One plane or row of a block, at block zero of both sides.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// Index of the source tensor.
    pub source_tensor: usize,
    /// Index of the target tensor.
    pub target_tensor: usize,
    /// Bytes from the source tensor's first.
    pub source_offset: u64,
    /// Bytes from the target tensor's first.
    pub target_offset: u64,
    /// Bytes from one block to the next, in source and target.
    pub block_strides: (u64, u64),
    /// The dimensions inside a block.
    pub dims: Vec<Dim>,
    /// Bytes of one item.
    pub item_bytes: u64,
}

/// Copies every part from each source block to the target block at the same place of its list.
pub(crate) fn schedule(parts: &[Part], source: &[u64], target: &[u64]) -> Result<Schedule> {
    if source.is_empty() {
        return Ok(Schedule::default());
    }
    let mut table = BlockTable::default();
    let mut slices = HashMap::new();
    let mut loops = Vec::new();
    for part in parts {
        if part.dims.iter().any(|dim| dim.count == 0) {
            continue;
        }
        check_loops(part)?;
        let entries = slices.entry(part.block_strides).or_insert_with(|| {
            let (source_stride, target_stride) = part.block_strides;
            let pairs = source.iter().zip(target);
            let mut offsets: Vec<(u64, u64)> =
                pairs.map(|(s, t)| (t * target_stride, s * source_stride)).collect();
            offsets.sort_unstable();
            let begin = table.target.len();
            table.target.extend(offsets.iter().map(|(target, _)| target));
            table.source.extend(offsets.iter().map(|(_, source)| source));
            begin..table.target.len()
        });
        for (source, target, strided) in Strided::fitting(part.item_bytes, part.dims.clone()) {
            loops.push(CopyLoop {
                source_tensor: part.source_tensor,
                target_tensor: part.target_tensor,
                source_offset: part.source_offset + source,
                target_offset: part.target_offset + target,
                strided,
                entries: entries.clone(),
            });
        }
    }
    Ok(Schedule { loops: fold(loops), table })
}

fn check_loops(part: &Part) -> Result<()> {
    let mut counts: Vec<u64> = part.dims.iter().map(|dim| dim.count).filter(|count| *count > 1).collect();
    counts.sort_unstable();
    let beyond = counts.len().saturating_sub(MAX_DIMS);
    let loops = counts[..beyond].iter().fold(1_u64, |loops, count| loops.saturating_mul(*count));
    if loops > MAX_LOOPS && Strided::new(part.item_bytes, part.dims.iter().copied()).is_none() {
        fail!(Layout, "blocks of {} dimensions that do not merge break up into {loops} loops", counts.len());
    }
    Ok(())
}
