//! Two engines whose TP sizes divide one another: what one TP rank holds, and whom it exchanges with.
//!
//! A rank of the smaller engine stands for a run of ranks of the larger one. That run is an interval of
//! the same split by which heads are shared out, so that both can never disagree.

use crate::error::{Result, fail};
use crate::specs::engine::MAX_RANKS;
use crate::specs::shard::Split;

/// Checks the numbers that describe the local rank.
pub fn check_local(tp_rank: i64, tp_size: i64, block_size: i64, num_kv_heads: i64) -> Result<()> {
    local_rank(tp_rank, tp_size)?;
    if block_size < 1 {
        fail!(Topology, "block size {block_size} of TP rank {tp_rank} is not positive");
    }
    heads_per_rank(num_kv_heads, tp_size).map(drop)
}

/// `local / remote` where the local engine has at least as many ranks, else `-(remote / local)`.
pub fn tp_ratio(local_tp_size: i64, remote_tp_size: i64) -> Result<i64> {
    for size in [local_tp_size, remote_tp_size] {
        if rank_count(size).is_none() {
            fail!(
                Topology,
                "local TP size {local_tp_size} and remote TP size {remote_tp_size}: \
                 {size} is outside [1, {MAX_RANKS}]"
            );
        }
    }
    let (larger, smaller) = (local_tp_size.max(remote_tp_size), local_tp_size.min(remote_tp_size));
    if larger % smaller != 0 {
        fail!(
            Topology,
            "local TP size {local_tp_size} and remote TP size {remote_tp_size}: \
             {larger} is not divisible by {smaller}"
        );
    }
    let ratio = larger / smaller;
    Ok(if local_tp_size >= remote_tp_size { ratio } else { -ratio })
}

/// The remote TP ranks that stand for the same part of the model as a local one, ascending.
pub fn target_ranks(tp_rank: i64, tp_size: i64, remote_tp_size: i64) -> Result<Vec<usize>> {
    let (rank, local) = local_rank(tp_rank, tp_size)?;
    tp_ratio(tp_size, remote_tp_size)?;
    let remote = rank_count(remote_tp_size).unwrap_or(0);
    let parts = local.max(remote) as u64;
    let own = Split::even_units(parts, local, rank);
    Ok((0..remote).filter(|&other| Split::even_units(parts, remote, other).overlaps(own)).collect())
}

/// KV heads that a TP rank holds; where they do not divide, that of the ranks with the fewest.
pub fn heads_per_rank(num_kv_heads: i64, tp_size: i64) -> Result<u64> {
    let (heads, ranks) = heads_and_ranks(num_kv_heads, tp_size)?;
    // The first rank has no rounding to gain from.
    Ok(Split::even_units(heads, ranks, 0).len())
}

/// Whether several TP ranks hold the same KV head.
pub fn replicates_heads(num_kv_heads: i64, tp_size: i64) -> Result<bool> {
    let (heads, ranks) = heads_and_ranks(num_kv_heads, tp_size)?;
    Ok(Split::is_replicated(heads, ranks))
}

/// Remote blocks that one local block covers.
pub fn block_size_ratio(local_block_size: i64, remote_block_size: i64) -> Result<i64> {
    if local_block_size < 1 || remote_block_size < 1 {
        fail!(
            Topology,
            "local block size {local_block_size} and remote block size {remote_block_size} \
             must both be positive"
        );
    }
    if local_block_size % remote_block_size != 0 {
        fail!(
            Topology,
            "local block size {local_block_size} is not divisible by remote block size {remote_block_size}"
        );
    }
    Ok(local_block_size / remote_block_size)
}

fn rank_count(tp_size: i64) -> Option<usize> {
    usize::try_from(tp_size).ok().filter(|size| (1..=MAX_RANKS).contains(size))
}

fn local_rank(tp_rank: i64, tp_size: i64) -> Result<(usize, usize)> {
    let Some(ranks) = rank_count(tp_size) else {
        fail!(Topology, "TP rank {tp_rank} of TP size {tp_size}: the size is outside [1, {MAX_RANKS}]");
    };
    match usize::try_from(tp_rank) {
        Ok(rank) if rank < ranks => Ok((rank, ranks)),
        _ => fail!(Topology, "TP rank {tp_rank} is outside [0, {tp_size}), the ranks of TP size {tp_size}"),
    }
}

fn heads_and_ranks(num_kv_heads: i64, tp_size: i64) -> Result<(u64, usize)> {
    match (u64::try_from(num_kv_heads), rank_count(tp_size)) {
        (Ok(heads), Some(ranks)) => Ok((heads, ranks)),
        _ => fail!(
            Topology,
            "{num_kv_heads} KV heads on TP size {tp_size}: heads must not be negative, \
             the size must lie in [1, {MAX_RANKS}]"
        ),
    }
}
