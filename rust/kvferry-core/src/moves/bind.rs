//! Binding: a plan and the tensors of one rank pair become copy loops over a block table.

use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use crate::error::{Result, fail};
use crate::memory::cache::{Placement, PlaneStrides, RankCache};
use crate::moves::overlap::{self, BoundSchedule};
use crate::moves::schedule::{BlockTable, CopyLoop, Schedule, fold};
use crate::moves::strided::{Dim, Strided};
use crate::planning::pieces::{Piece, Place, Shape};
use crate::planning::plan::Plan;
use crate::planning::route::Transfer;
use crate::side::Side;

/// Binds what `target` reads from `source` in this plan; nothing where they are no pair of it.
pub fn bind(plan: &Plan, source: &RankCache, target: &RankCache) -> Result<Schedule> {
    check_side(plan, Side::Source, source)?;
    check_side(plan, Side::Target, target)?;
    let (tables, planes, table) = (Vec::new(), Vec::new(), BlockTable::default());
    let mut binder = Binder { plan, source, target, tables, planes, table };
    let (mut loops, mut next) = (Vec::new(), [0; 2]);
    let ends = (source.rank, target.rank);
    let moves = |transfer: &&Transfer| (transfer.source_rank, transfer.target_rank) == ends;
    for transfer in plan.transfers().iter().filter(moves) {
        let pair = &plan.route().pairs()[transfer.pair];
        for &layer in &pair.layers[transfer.layers.clone()] {
            for plane in pair.facets[transfer.facet].planes.clone() {
                let from = source.placement((pair.source_group, layer, plane), &mut next[0]);
                let to = target.placement((pair.target_group, layer, plane), &mut next[1]);
                if let (Some(from), Some(to)) = (from, to) {
                    binder.loops(transfer, from, to, &mut loops)?;
                }
            }
        }
    }
    let schedule = Schedule { loops: fold(loops), table: binder.table };
    schedule.check_writable(&target.regions)?;
    Ok(schedule)
}

/// Binds one rank pair and checks what it writes: against what all pairs of the plan write to the same
/// rank, and, where both sides are in `one_process`, against what it reads.
pub fn bind_checked(
    plan: &Plan,
    source: &RankCache,
    target: &RankCache,
    one_process: bool,
) -> Result<Schedule> {
    let schedule = bind(plan, source, target)?;
    overlap::check(&[BoundSchedule::new(&schedule, source, target)], one_process)?;
    if overlap::shares_memory(&target.regions) {
        check_other_pairs(plan, source.rank, &schedule, target)?;
    }
    Ok(schedule)
}

/// Tensors of one memory may clash only through what several sources write; where these read from does
/// not matter for that.
fn check_other_pairs(plan: &Plan, source_rank: usize, schedule: &Schedule, target: &RankCache) -> Result<()> {
    let mut others = Vec::new();
    for (rank, target_rank) in plan.rank_pairs() {
        if target_rank == target.rank && rank != source_rank {
            let engine = Arc::clone(plan.route().source());
            let dense = RankCache::dense(engine, rank, |group| plan.block_count(Side::Source, group))?;
            others.push((bind(plan, &dense, target)?, dense));
        }
    }
    let bound = others.iter().map(|(schedule, source)| BoundSchedule::new(schedule, source, target));
    let this = others.first().map(|(_, source)| BoundSchedule::new(schedule, source, target));
    overlap::check(&bound.chain(this).collect::<Vec<_>>(), false)
}

/// The tensors must be those of the engine and rank that the route knows.
fn check_side(plan: &Plan, side: Side, cache: &RankCache) -> Result<()> {
    let engine = plan.route().engine(side);
    if !Arc::ptr_eq(engine, &cache.engine) && **engine != *cache.engine {
        fail!(
            Value,
            "the {side} tensors are those of an engine {:?} that differs from the route's {side} {:?}",
            cache.engine.id,
            engine.id
        );
    }
    Ok(())
}

/// What decides a table's slices: the pieces, and block and slot strides of source and target.
type TableKey = ((usize, u64, u64), [u64; 4]);

/// Slices of the table, each with the shape of its pieces.
type Slices = Vec<(Shape, Range<usize>)>;

struct Binder<'a> {
    plan: &'a Plan,
    source: &'a RankCache,
    target: &'a RankCache,
    /// Slices that exist already.
    tables: Vec<(TableKey, Slices)>,
    /// What planes that lie alike have in common.
    planes: Vec<PlaneLoops<'a>>,
    table: BlockTable,
}

/// The loops of a plane whose tensors begin with it, by which planes that lie alike differ.
struct PlaneLoops<'a> {
    transfer: &'a Transfer,
    strides: [&'a PlaneStrides; 2],
    loops: Vec<CopyLoop>,
}

impl<'a> Binder<'a> {
    /// The loops of one plane of one layer: at least one for every shape of piece.
    fn loops(
        &mut self,
        transfer: &'a Transfer,
        from: &'a Placement,
        to: &'a Placement,
        loops: &mut Vec<CopyLoop>,
    ) -> Result<()> {
        self.check_blocks(transfer.pair, from, to)?;
        let strides = [&from.strides, &to.strides];
        let is_alike = |plane: &PlaneLoops<'_>| ptr::eq(plane.transfer, transfer) && plane.strides == strides;
        let alike = self.planes.iter().rposition(is_alike).unwrap_or_else(|| {
            let loops = self.plane_loops(transfer, strides);
            self.planes.push(PlaneLoops { transfer, strides, loops });
            self.planes.len() - 1
        });
        loops.extend(self.planes[alike].loops.iter().map(|copy| CopyLoop {
            source_tensor: from.tensor,
            target_tensor: to.tensor,
            source_offset: from.offset + copy.source_offset,
            target_offset: to.offset + copy.target_offset,
            ..copy.clone()
        }));
        Ok(())
    }

    fn plane_loops(&mut self, transfer: &Transfer, [from, to]: [&PlaneStrides; 2]) -> Vec<CopyLoop> {
        let (first, count) = (transfer.units.begin, transfer.units.len());
        let source_offset = (first - from.units.first) * from.units.stride;
        let target_offset = (first - to.units.first) * to.units.stride;
        let units = dim(count, from.units.stride, to.units.stride);
        let inside = from.units.inside.iter().zip(&to.units.inside);
        let inside = inside.map(|((count, source), (_, target))| dim(*count, *source, *target));
        let mut loops = Vec::new();
        for (shape, entries) in self.slices(transfer, from, to) {
            let slots = dim(shape.slots, from.slot_stride, to.slot_stride);
            let repeats =
                dim(shape.repeats, shape.source_step * from.slot_stride, shape.target_step * to.slot_stride);
            let dims: Vec<Dim> = [repeats, slots, units].into_iter().chain(inside.clone()).collect();
            for (source, target, strided) in Strided::fitting(from.units.run_bytes, dims) {
                loops.push(CopyLoop {
                    source_tensor: 0,
                    target_tensor: 0,
                    source_offset: source_offset + source,
                    target_offset: target_offset + target,
                    strided,
                    entries: entries.clone(),
                });
            }
        }
        loops
    }

    /// Every block that is moved must exist in the tensors.
    fn check_blocks(&self, pair: usize, from: &Placement, to: &Placement) -> Result<()> {
        let group_pair = &self.plan.route().pairs()[pair];
        let sides =
            [(Side::Source, self.source.blocks(from.tensor)), (Side::Target, self.target.blocks(to.tensor))];
        for ((side, tensor_blocks), paging) in sides.into_iter().zip(&group_pair.paging) {
            let highest = self.plan.highest_block(side, pair);
            let blocks = tensor_blocks / paging.physical_blocks;
            if highest >= blocks {
                fail!(
                    BlockRange,
                    "block id {highest} of group {} of engine {:?} is outside [0, {blocks})",
                    group_pair.group(side),
                    self.plan.route().engine(side).id
                );
            }
        }
        Ok(())
    }

    /// Table slices of a transfer for these strides, one a shape of piece, in target order.
    fn slices(&mut self, transfer: &Transfer, from: &PlaneStrides, to: &PlaneStrides) -> Slices {
        let strides = [from.block_stride, from.slot_stride, to.block_stride, to.slot_stride];
        let key = (self.plan.piece_key(transfer), strides);
        if let Some((_, slices)) = self.tables.iter().rfind(|(known, _)| *known == key) {
            return slices.clone();
        }
        let [source, target] =
            self.plan.route().pairs()[transfer.pair].paging.map(|paging| paging.physical_blocks);
        let source_at = |place: Place| {
            (place.block * source + place.physical) * from.block_stride + place.slot * from.slot_stride
        };
        let target_at = |place: Place| {
            (place.block * target + place.physical) * to.block_stride + place.slot * to.slot_stride
        };
        let slices = append_pieces(&mut self.table, self.plan.pieces(transfer), source_at, target_at);
        self.tables.push((key, slices.clone()));
        slices
    }
}

fn dim(count: u64, source_stride: u64, target_stride: u64) -> Dim {
    Dim { count, source_stride, target_stride }
}

fn append_pieces(
    table: &mut BlockTable,
    pieces: &[Piece],
    source_at: impl Fn(Place) -> u64,
    target_at: impl Fn(Place) -> u64,
) -> Slices {
    let mut by_shape: BTreeMap<Shape, Vec<(u64, u64)>> = BTreeMap::new();
    for piece in pieces {
        by_shape.entry(piece.shape).or_default().push((target_at(piece.target), source_at(piece.source)));
    }
    let mut slices = Vec::with_capacity(by_shape.len());
    for (shape, mut offsets) in by_shape {
        offsets.sort_unstable();
        let begin = table.target.len();
        table.target.extend(offsets.iter().map(|(target, _)| target));
        table.source.extend(offsets.iter().map(|(_, source)| source));
        slices.push((shape, begin..table.target.len()));
    }
    slices
}
