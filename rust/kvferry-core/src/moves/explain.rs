//! Explanation: a plan in numbers, for people who ask why a transfer is slow.

use std::sync::Arc;

use crate::error::Result;
use crate::memory::cache::RankCache;
use crate::moves::bind::bind;
use crate::moves::columns::Expansion;
use crate::moves::schedule::Schedule;
use crate::moves::staging::stage;
use crate::planning::plan::Plan;
use crate::side::Side;

/// Fragments of this average move well enough by themselves: their bytes take as long on a wire as a
/// good part of the 5 µs that a descriptor costs.
pub const DEFAULT_MIN_MEAN_BYTES: u64 = 4096;

/// What one rank pair moves, directly and staged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Copy loops.
    pub num_loops: u64,
    /// Pieces that are contiguous on both sides.
    pub num_fragments: u64,
    /// Payload.
    pub num_bytes: u64,
    /// Smallest and largest fragment; zero where there is none.
    pub fragment_bytes: (u64, u64),
    /// Descriptors of the first step of a staged transfer.
    pub staged_descriptors: u64,
    /// Bytes that it moves, which the scratch buffer must have.
    pub staged_bytes: u64,
}

impl Summary {
    /// Whether staging pays: fragments are smaller than `min_mean_bytes` on average, and it has at most
    /// half as many descriptors.
    pub fn staging_pays(&self, min_mean_bytes: u64) -> bool {
        let is_small =
            u128::from(self.num_bytes) < u128::from(self.num_fragments) * u128::from(min_mean_bytes);
        is_small && self.staged_descriptors <= self.num_fragments / 2
    }
}

/// Summarises one rank pair's schedule.
pub fn summarize(schedule: &Schedule) -> Result<Summary> {
    let expansion = Expansion::new(schedule)?;
    let staged = stage(schedule)?;
    Ok(Summary {
        num_loops: schedule.loops.len() as u64,
        num_fragments: expansion.len() as u64,
        num_bytes: schedule.num_bytes(),
        fragment_bytes: (expansion.min_bytes(), expansion.max_bytes()),
        staged_descriptors: staged.runs.len() as u64,
        staged_bytes: staged.scratch_bytes,
    })
}

/// Summarises every rank pair of a plan, over the given tensors or, for ranks that are not among them,
/// over dense ones.
pub fn explain(
    plan: &Plan,
    sources: &[Arc<RankCache>],
    targets: &[Arc<RankCache>],
) -> Result<Vec<((usize, usize), Summary)>> {
    let summary = |(source_rank, target_rank)| {
        let source = cache_of(plan, Side::Source, sources, source_rank)?;
        let target = cache_of(plan, Side::Target, targets, target_rank)?;
        Ok(((source_rank, target_rank), summarize(&bind(plan, &source, &target)?)?))
    };
    plan.rank_pairs().into_iter().map(summary).collect()
}

fn cache_of(plan: &Plan, side: Side, given: &[Arc<RankCache>], rank: usize) -> Result<Arc<RankCache>> {
    if let Some(cache) = given.iter().find(|cache| cache.rank == rank) {
        return Ok(Arc::clone(cache));
    }
    let engine = plan.route().engine(side);
    RankCache::dense(Arc::clone(engine), rank, |group| plan.block_count(side, group)).map(Arc::new)
}
