//! Binding: a plan and the tensors of one rank pair become copy loops over a block table.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use crate::blocks::Piece;
use crate::cache::{Placement, Placements, RankCache};
use crate::error::{Result, fail};
use crate::plan::Plan;
use crate::route::{GroupPair, Side, Transfer};
use crate::strided::{BlockTable, CopyLoop, Dim, Strided, fold};

/// Everything that one rank pair of a plan moves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// The loops, by target tensor.
    pub loops: Vec<CopyLoop>,
    /// The entries that they repeat over.
    pub table: BlockTable,
}

/// Binds what `target` reads from `source` in this plan; nothing where they are no pair of it.
pub fn bind(plan: &Plan, source: &RankCache, target: &RankCache) -> Result<Schedule> {
    check_side(plan, Side::Source, source)?;
    check_side(plan, Side::Target, target)?;
    let mut binder = Binder { plan, source, target, tables: HashMap::new(), table: BlockTable::default() };
    let (source_places, target_places) = (Placements::new(source), Placements::new(target));
    let mut loops = Vec::new();
    let ends = (source.rank, target.rank);
    let moves = |transfer: &&Transfer| (transfer.source_rank, transfer.target_rank) == ends;
    for transfer in plan.transfers().iter().filter(moves) {
        let pair = &plan.route().pairs()[transfer.pair];
        for &layer in &pair.layers {
            for (plane, &row_bytes) in pair.row_bytes.iter().enumerate() {
                let from = source_places.find(pair.source_group, layer, plane);
                let to = target_places.find(pair.target_group, layer, plane);
                if let (Some(from), Some(to)) = (from, to) {
                    binder.loops(transfer, row_bytes, from, to, &mut loops)?;
                }
            }
        }
    }
    Ok(Schedule { loops: fold(loops), table: binder.table })
}

/// The tensors must be those of the engine and rank that the route knows.
fn check_side(plan: &Plan, side: Side, cache: &RankCache) -> Result<()> {
    let engine = side.engine(plan.route());
    if !std::sync::Arc::ptr_eq(engine, &cache.engine) && **engine != *cache.engine {
        fail!(
            Value,
            "the {side} tensors are those of an engine {:?} that differs from the route's {side} {:?}",
            cache.engine.id,
            engine.id
        );
    }
    if side == Side::Target {
        let written = plan.transfers().iter().filter(|transfer| transfer.target_rank == cache.rank);
        let groups: Vec<usize> =
            written.map(|transfer| side.group(&plan.route().pairs()[transfer.pair])).collect();
        for (slot, tensor) in cache.slots.iter().zip(&cache.tensors) {
            if groups.contains(&slot.group) && !tensor.writable {
                fail!(
                    Layout,
                    "tensor {:?} of rank {} is read-only, it cannot be a target; pass a writable one",
                    slot.name,
                    cache.rank
                );
            }
        }
    }
    Ok(())
}

/// Strides that decide a table: block and slot, source and target.
type TableKey = (usize, [u64; 4]);

struct Binder<'a> {
    plan: &'a Plan,
    source: &'a RankCache,
    target: &'a RankCache,
    /// Table slices that exist already, each with the slots of its pieces.
    tables: HashMap<TableKey, Vec<(u64, Range<usize>)>>,
    table: BlockTable,
}

impl Binder<'_> {
    /// One loop for every length of piece.
    fn loops(
        &mut self,
        transfer: &Transfer,
        row_bytes: u64,
        from: Placement,
        to: Placement,
        loops: &mut Vec<CopyLoop>,
    ) -> Result<()> {
        self.check_blocks(transfer.pair, from, to)?;
        let heads = Dim {
            count: transfer.units.len(),
            source_stride: from.head_stride,
            target_stride: to.head_stride,
        };
        for (slots, entries) in self.slices(transfer.pair, from, to) {
            let slots = Dim { count: slots, source_stride: from.slot_stride, target_stride: to.slot_stride };
            let strided = Strided::new(row_bytes, [heads, slots]).expect("two dimensions fit");
            loops.push(CopyLoop {
                source_tensor: from.tensor,
                target_tensor: to.tensor,
                source_offset: from.offset + (transfer.units.begin - from.first_head) * from.head_stride,
                target_offset: to.offset + (transfer.units.begin - to.first_head) * to.head_stride,
                strided,
                entries,
            });
        }
        Ok(())
    }

    /// Every block that is moved must exist in the tensors.
    fn check_blocks(&self, pair: usize, from: Placement, to: Placement) -> Result<()> {
        let group_pair: &GroupPair = &self.plan.route().pairs()[pair];
        let sides =
            [(Side::Source, self.source.blocks(from.tensor)), (Side::Target, self.target.blocks(to.tensor))];
        for (side, blocks) in sides {
            let highest = self.plan.highest_block(side, pair);
            if highest >= blocks {
                fail!(
                    BlockRange,
                    "block id {highest} of group {} of engine {:?} is outside [0, {blocks})",
                    side.group(group_pair),
                    side.engine(self.plan.route()).id
                );
            }
        }
        Ok(())
    }

    /// Table slices of a group pair for these strides, one a length of piece, in target order.
    fn slices(&mut self, pair: usize, from: Placement, to: Placement) -> Vec<(u64, Range<usize>)> {
        let strides = [from.block_stride, from.slot_stride, to.block_stride, to.slot_stride];
        let table = &mut self.table;
        let pieces = self.plan.pieces(pair);
        self.tables.entry((pair, strides)).or_insert_with(|| append_pieces(table, pieces, strides)).clone()
    }
}

fn append_pieces(table: &mut BlockTable, pieces: &[Piece], strides: [u64; 4]) -> Vec<(u64, Range<usize>)> {
    let [source_block, source_slot, target_block, target_slot] = strides;
    let mut by_slots: BTreeMap<u64, Vec<(u64, u64)>> = BTreeMap::new();
    for piece in pieces {
        let target = piece.target_block * target_block + piece.target_slot * target_slot;
        let source = piece.source_block * source_block + piece.source_slot * source_slot;
        by_slots.entry(piece.slots).or_default().push((target, source));
    }
    let mut slices = Vec::with_capacity(by_slots.len());
    for (slots, mut offsets) in by_slots {
        offsets.sort_unstable();
        let begin = table.target.len();
        table.target.extend(offsets.iter().map(|(target, _)| target));
        table.source.extend(offsets.iter().map(|(_, source)| source));
        slices.push((slots, begin..table.target.len()));
    }
    slices
}
