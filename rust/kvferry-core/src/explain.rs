//! Explanation: a plan in numbers, for people who ask why a transfer is slow.

use std::sync::Arc;

use crate::bind::bind;
use crate::cache::RankCache;
use crate::error::Result;
use crate::expand::{Fragment, fragments};
use crate::plan::Plan;
use crate::route::Side;

/// What one rank pair moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairSummary {
    /// Rank that is read.
    pub source_rank: usize,
    /// Rank that is written.
    pub target_rank: usize,
    /// Copy loops.
    pub num_loops: u64,
    /// Pieces that are contiguous on both sides.
    pub num_fragments: u64,
    /// Payload.
    pub num_bytes: u64,
    /// Smallest and largest fragment; zero where there is none.
    pub fragment_bytes: (u64, u64),
}

/// Summarises every pair of a plan, over the given tensors or, for ranks that are not among them, over
/// dense ones.
pub fn explain(
    plan: &Plan,
    sources: &[Arc<RankCache>],
    targets: &[Arc<RankCache>],
) -> Result<Vec<PairSummary>> {
    let summary = |(source_rank, target_rank)| {
        let source = cache_of(plan, Side::Source, sources, source_rank)?;
        let target = cache_of(plan, Side::Target, targets, target_rank)?;
        let schedule = bind(plan, &source, &target)?;
        let fragments = fragments(&schedule)?;
        let lengths = || fragments.iter().map(|fragment: &Fragment| fragment.length);
        Ok(PairSummary {
            source_rank,
            target_rank,
            num_loops: schedule.loops.len() as u64,
            num_fragments: fragments.len() as u64,
            num_bytes: lengths().sum(),
            fragment_bytes: (lengths().min().unwrap_or(0), lengths().max().unwrap_or(0)),
        })
    };
    plan.rank_pairs().into_iter().map(summary).collect()
}

fn cache_of(plan: &Plan, side: Side, given: &[Arc<RankCache>], rank: usize) -> Result<Arc<RankCache>> {
    if let Some(cache) = given.iter().find(|cache| cache.rank == rank) {
        return Ok(Arc::clone(cache));
    }
    let engine = side.engine(plan.route());
    RankCache::dense(Arc::clone(engine), rank, |group| plan.block_count(side, group)).map(Arc::new)
}
