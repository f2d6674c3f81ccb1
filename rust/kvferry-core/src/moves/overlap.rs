//! Overlap: no byte may be written through two tensors, nor both read and written.
//!
//! Writes through one tensor are disjoint by construction: its strides don't overlap and no block is
//! named twice. So only tensors that share memory are looked at, first block by block, and run by run
//! where blocks interleave.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{Result, fail};
use crate::interval::Interval;
use crate::memory::cache::RankCache;
use crate::moves::expand::{MAX_RUNS, try_push};
use crate::moves::schedule::Schedule;
use crate::moves::strided::{Dim, Strided, each_step};
use crate::side::Side;
use crate::specs::layout::Axis;

/// A schedule with the tensors that it was bound to.
#[derive(Clone, Copy, Debug)]
pub struct BoundSchedule<'a> {
    /// What is moved.
    pub schedule: &'a Schedule,
    /// Where from.
    pub source: &'a RankCache,
    /// Where to.
    pub target: &'a RankCache,
}

/// A tensor at one end of some schedules: side, rank, tensor index.
type Owner = (Side, usize, usize);

/// Memory that an owner touches.
#[derive(Clone, Copy, Debug)]
struct Span {
    bytes: Interval,
    owner: Owner,
}

/// How finely memory is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Grain {
    /// Everything between the first and the last byte of a loop's step inside one block.
    Block,
    /// Every run by itself.
    Run,
}

/// Checks schedules that run together. `one_process` says that source and target addresses count in the
/// same memory; else only the targets are compared with each other.
pub fn check(bound: &[BoundSchedule<'_>], one_process: bool) -> Result<()> {
    let shared = sharing_memory(bound, one_process);
    if shared.is_empty() || conflict(&spans(bound, &shared, Grain::Block)?).is_none() {
        return Ok(());
    }
    for bound in bound {
        bound.schedule.check_runs(MAX_RUNS)?;
    }
    let Some((one, other)) = conflict(&spans(bound, &shared, Grain::Run)?) else {
        return Ok(());
    };
    let both = one.bytes.intersect(other.bytes);
    fail!(
        Overlap,
        "bytes [{:#x}, {:#x}) are {} and {}",
        both.begin,
        both.end,
        describe(bound, one.owner),
        describe(bound, other.owner)
    )
}

/// Whether any two tensors of a cache lie in the same memory.
pub fn shares_memory(cache: &RankCache) -> bool {
    let mut regions: Vec<Interval> = (0..cache.tensors.len())
        .map(|tensor| {
            let address = cache.tensors[tensor].address;
            Interval::new(address, address + cache.extent_bytes(tensor))
        })
        .collect();
    regions.sort_unstable();
    regions.windows(2).any(|pair| pair[0].end > pair[1].begin)
}

/// Owners whose memory touches that of another, with a write on at least one side.
fn sharing_memory(bound: &[BoundSchedule<'_>], one_process: bool) -> BTreeSet<Owner> {
    let mut regions: BTreeMap<Owner, (i32, i32, Interval)> = BTreeMap::new();
    for BoundSchedule { schedule, source, target } in bound {
        for copy in &schedule.loops {
            let mut add = |side: Side, cache: &RankCache, tensor: usize| {
                let Some(registered) = cache.tensors.get(tensor) else { return };
                let bytes =
                    Interval::new(registered.address, registered.address + cache.extent_bytes(tensor));
                let device = registered.device;
                // Pinned host memory is addressed like any other host memory.
                let (kind, index) = if device.is_host() { (1, 0) } else { (device.kind, device.index) };
                regions.insert((side, cache.rank, tensor), (kind, index, bytes));
            };
            add(Side::Target, target, copy.target_tensor);
            if one_process {
                add(Side::Source, source, copy.source_tensor);
            }
        }
    }
    let mut sorted: Vec<_> = regions.into_iter().map(|(owner, region)| (region, owner)).collect();
    sorted.sort_unstable_by_key(|((kind, index, bytes), owner)| (*kind, *index, *bytes, *owner));
    let mut sharing = BTreeSet::new();
    let mut cluster: Vec<Owner> = Vec::new();
    let mut reach: Option<(i32, i32, u64)> = None;
    for ((kind, index, bytes), owner) in sorted {
        let joins = reach.is_some_and(|reach| (reach.0, reach.1) == (kind, index) && bytes.begin < reach.2);
        if !joins {
            close(&mut cluster, &mut sharing);
            reach = None;
        }
        cluster.push(owner);
        reach = Some((kind, index, reach.map_or(0, |reach| reach.2).max(bytes.end)));
    }
    close(&mut cluster, &mut sharing);
    sharing
}

fn close(cluster: &mut Vec<Owner>, sharing: &mut BTreeSet<Owner>) {
    let writes = cluster.iter().any(|(side, ..)| *side == Side::Target);
    if cluster.len() > 1 && writes {
        sharing.extend(cluster.iter());
    }
    cluster.clear();
}

/// What the owners touch, sorted, each owner's own spans merged.
fn spans(bound: &[BoundSchedule<'_>], owners: &BTreeSet<Owner>, grain: Grain) -> Result<Vec<Span>> {
    let mut spans = Vec::new();
    for BoundSchedule { schedule, source, target } in bound {
        for copy in &schedule.loops {
            let ends = [
                (Side::Target, *target, copy.target_tensor, copy.target_offset, &schedule.table.target),
                (Side::Source, *source, copy.source_tensor, copy.source_offset, &schedule.table.source),
            ];
            for (side, cache, tensor, offset, table) in ends {
                let owner = (side, cache.rank, tensor);
                if !owners.contains(&owner) {
                    continue;
                }
                let block_bytes = cache.tensors[tensor].stride(&cache.slots[tensor], Axis::Block);
                let (outer, hull_bytes) = hull(&copy.strided, side, grain, block_bytes);
                let start = cache.tensors[tensor].address + offset;
                for entry in &table[copy.entries.clone()] {
                    let mut pushed = Ok(());
                    each_step(&outer, start + entry, start + entry, &mut |source, target| {
                        let begin = if side == Side::Source { source } else { target };
                        if pushed.is_ok() {
                            let span = Span { bytes: Interval::new(begin, begin + hull_bytes), owner };
                            pushed = try_push(&mut spans, span);
                        }
                    });
                    pushed?;
                }
            }
        }
    }
    spans.sort_unstable_by_key(|span| (span.owner, span.bytes));
    spans.dedup_by(|next, last| {
        let joins = next.owner == last.owner && next.bytes.begin <= last.bytes.end;
        if joins {
            last.bytes.end = last.bytes.end.max(next.bytes.end);
        }
        joins
    });
    spans.sort_unstable_by_key(|span| span.bytes);
    Ok(spans)
}

/// The dimensions to step along, and the bytes that each step is taken to touch.
fn hull(strided: &Strided, side: Side, grain: Grain, block_bytes: u64) -> (Vec<Dim>, u64) {
    let stride = |dim: &Dim| if side == Side::Source { dim.source_stride } else { dim.target_stride };
    let steps = |dim: &&Dim| grain == Grain::Run || stride(dim) >= block_bytes;
    let (outer, inner): (Vec<&Dim>, Vec<&Dim>) = strided.looping().iter().partition(steps);
    let inside: u64 = inner.iter().map(|dim| (dim.count - 1) * stride(dim)).sum();
    (outer.into_iter().copied().collect(), inside + strided.run_bytes)
}

/// The first two spans of different owners that overlap with a write among them.
fn conflict(sorted: &[Span]) -> Option<(Span, Span)> {
    let mut furthest_write: Option<Span> = None;
    let mut furthest_read: Option<Span> = None;
    for &span in sorted {
        let is_write = span.owner.0 == Side::Target;
        let reaches = |earlier: &Option<Span>| earlier.filter(|earlier| earlier.bytes.end > span.bytes.begin);
        let hit = reaches(&furthest_write).or_else(|| reaches(&furthest_read).filter(|_| is_write));
        if let Some(earlier) = hit {
            return Some((earlier, span));
        }
        let furthest = if is_write { &mut furthest_write } else { &mut furthest_read };
        if furthest.is_none_or(|earlier| earlier.bytes.end < span.bytes.end) {
            *furthest = Some(span);
        }
    }
    None
}

fn describe(bound: &[BoundSchedule<'_>], (side, rank, tensor): Owner) -> String {
    let (verb, cache_at): (_, for<'a> fn(&BoundSchedule<'a>) -> &'a RankCache) = match side {
        Side::Source => ("read", |bound| bound.source),
        Side::Target => ("written", |bound| bound.target),
    };
    let caches = bound.iter().map(cache_at);
    let name =
        caches.filter(|cache| cache.rank == rank).map(|cache| cache.slots[tensor].name.as_str()).next();
    format!("{verb} through {side} tensor {:?} of rank {rank}", name.unwrap_or_default())
}
