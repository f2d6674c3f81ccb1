//! Overlap: no byte may be written through two tensors, nor both read and written.
//!
//! Writes through one tensor are disjoint by construction: its strides don't overlap and no block is
//! named twice. So only tensors that share memory are looked at, first block by block, and run by run
//! where blocks interleave.

use std::collections::{BTreeMap, BTreeSet};
use std::ptr;

use crate::error::{Result, fail};
use crate::interval::Interval;
use crate::memory::cache::RankCache;
use crate::memory::region::Region;
use crate::moves::expand::{MAX_RUNS, try_push};
use crate::moves::schedule::Schedule;
use crate::moves::strided::{Dim, Strided, each_step};
use crate::side::Side;

/// A schedule with the memory that it was bound to.
#[derive(Clone, Copy, Debug)]
pub struct BoundSchedule<'a> {
    /// What is moved.
    pub schedule: &'a Schedule,
    /// Where from: the source tensors' memory.
    pub source: &'a [Region],
    /// Where to: the target tensors' memory.
    pub target: &'a [Region],
}

impl<'a> BoundSchedule<'a> {
    /// A schedule that was bound to the tensors of two ranks.
    pub fn new(schedule: &'a Schedule, source: &'a RankCache, target: &'a RankCache) -> Self {
        Self { schedule, source: &source.regions, target: &target.regions }
    }

    fn regions(&self, side: Side) -> &'a [Region] {
        side.of(self.source, self.target)
    }
}

/// Bound on the spans that are compared: 2.5 GiB of them. Only blocks that interleave in memory have so
/// many.
const MAX_SPANS: u128 = 1 << 26;

/// A tensor at one end of some schedules: side, the first of the schedules that has it, tensor index.
type Owner = (Side, usize, usize);

/// The first schedule with the same tensors on that side.
fn first_with(bound: &[BoundSchedule<'_>], side: Side, regions: &[Region]) -> usize {
    bound.iter().position(|other| ptr::eq(other.regions(side), regions)).unwrap_or(bound.len())
}

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
    if !may_share(bound) {
        return Ok(());
    }
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

/// Whether any two tensors lie in the same memory.
pub fn shares_memory(regions: &[Region]) -> bool {
    overlap(regions.iter().map(Region::bytes).collect())
}

/// Whether any two tensors of all ends do, whatever device they are on: mostly none does, and then there is
/// nothing to look into.
fn may_share(bound: &[BoundSchedule<'_>]) -> bool {
    let mut regions = Vec::new();
    for (index, end) in bound.iter().enumerate() {
        for side in [Side::Source, Side::Target] {
            if first_with(bound, side, end.regions(side)) == index {
                regions.extend(end.regions(side).iter().map(Region::bytes));
            }
        }
    }
    overlap(regions)
}

fn overlap(mut regions: Vec<Interval>) -> bool {
    regions.retain(|region| !region.is_empty());
    regions.sort_unstable();
    regions.windows(2).any(|pair| pair[0].end > pair[1].begin)
}

/// Owners whose memory touches that of another, with a write on at least one side.
fn sharing_memory(bound: &[BoundSchedule<'_>], one_process: bool) -> BTreeSet<Owner> {
    let mut regions: BTreeMap<Owner, (i32, i32, Interval)> = BTreeMap::new();
    for BoundSchedule { schedule, source, target } in bound {
        let first = [Side::Source, Side::Target].map(|side| first_with(bound, side, side.of(source, target)));
        for copy in &schedule.loops {
            let mut add = |side: Side, end: &[Region], tensor: usize| {
                let device = end[tensor].device;
                // Pinned host memory is addressed like any other host memory.
                let (kind, index) = if device.is_host() { (1, 0) } else { (device.kind, device.index) };
                let owner = (side, side.of(first[0], first[1]), tensor);
                regions.insert(owner, (kind, index, end[tensor].bytes()));
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
    let mut num_spans = 0;
    for BoundSchedule { schedule, source, target } in bound {
        let first = [Side::Source, Side::Target].map(|side| first_with(bound, side, side.of(source, target)));
        for copy in &schedule.loops {
            let ends = [
                (Side::Target, *target, copy.target_tensor, copy.target_offset, &schedule.table.target),
                (Side::Source, *source, copy.source_tensor, copy.source_offset, &schedule.table.source),
            ];
            for (side, end, tensor, offset, table) in ends {
                let owner = (side, side.of(first[0], first[1]), tensor);
                if !owners.contains(&owner) {
                    continue;
                }
                let (outer, hull_bytes) = hull(&copy.strided, side, grain, end[tensor].block_stride);
                let start = end[tensor].address + offset;
                let steps: u128 = outer.iter().map(|dim| u128::from(dim.count)).product();
                num_spans += steps * copy.entries.len() as u128;
                if num_spans > MAX_SPANS {
                    fail!(
                        Value,
                        "{} shares memory that is written, in more than {MAX_SPANS} pieces: too many to compare",
                        end[tensor].name
                    );
                }
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
fn hull(strided: &Strided, side: Side, grain: Grain, block_stride: u64) -> (Vec<Dim>, u64) {
    let stride = |dim: &Dim| if side == Side::Source { dim.source_stride } else { dim.target_stride };
    let steps = |dim: &&Dim| grain == Grain::Run || stride(dim) >= block_stride;
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

fn describe(bound: &[BoundSchedule<'_>], (side, first, tensor): Owner) -> String {
    let verb = side.of("read", "written");
    format!("{verb} through {side} {}", bound[first].regions(side)[tensor].name)
}
