//! The registered tensors of one rank, and where in them each layer's planes lie.

use std::sync::Arc;

use crate::error::{Result, counted, fail};
use crate::memory::region::Region;
use crate::memory::tensor::{RawTensor, Tensor};
use crate::specs::engine::Engine;
use crate::specs::layout::Axis;
use crate::specs::model::{GroupKind, StatePart};
use crate::specs::slot::TensorSlot;

/// One rank's tensors, checked against the slots that its engine's layout asks for.
#[derive(Clone, Debug)]
pub struct RankCache {
    /// The engine whose rank it is.
    pub engine: Arc<Engine>,
    /// Global rank.
    pub rank: usize,
    /// What each tensor holds.
    pub slots: Vec<TensorSlot>,
    /// The tensors, in slot order.
    pub tensors: Vec<Tensor>,
    /// The tensors' memory, in slot order.
    pub regions: Vec<Region>,
    /// Where each layer's planes lie, by group, layer and plane.
    placements: Vec<((usize, u64, usize), Placement)>,
}

impl RankCache {
    /// Checks tensors in slot order. `axes` names their dimensions, one entry a group.
    pub fn new(
        engine: Arc<Engine>,
        rank: usize,
        tensors: &[RawTensor],
        axes: &[Option<String>],
    ) -> Result<Self> {
        let slots = engine.slots(rank)?;
        if tensors.len() != slots.len() {
            fail!(
                Layout,
                "rank {rank} of engine {:?} registers {}, got {}",
                engine.id,
                counted(slots.len(), "tensor"),
                tensors.len()
            );
        }
        let register = |(slot, raw): (&TensorSlot, &RawTensor)| {
            let axes = axes.get(slot.group).and_then(Option::as_deref);
            Tensor::register(slot, raw, axes)
        };
        let tensors = slots.iter().zip(tensors).map(register).collect::<Result<Vec<_>>>()?;
        Ok(Self::of(engine, rank, slots, tensors))
    }

    /// Tensors without padding, with so many blocks a group.
    pub fn dense(engine: Arc<Engine>, rank: usize, blocks: impl Fn(usize) -> u64) -> Result<Self> {
        let slots = engine.slots(rank)?;
        let dense = |slot: &TensorSlot| {
            let physical = engine.groups[slot.group].physical_blocks_per_block;
            match blocks(slot.group).checked_mul(physical) {
                Some(blocks) => Tensor::dense(slot, blocks),
                None => fail!(Value, "tensor {:?} has more than 2^64 blocks", slot.name),
            }
        };
        let tensors = slots.iter().map(dense).collect::<Result<Vec<_>>>()?;
        Ok(Self::of(engine, rank, slots, tensors))
    }

    fn of(engine: Arc<Engine>, rank: usize, slots: Vec<TensorSlot>, tensors: Vec<Tensor>) -> Self {
        let region = |(slot, tensor): (&TensorSlot, &Tensor)| Region {
            name: format!("tensor {:?} of rank {rank}", slot.name),
            address: tensor.address,
            extent_bytes: tensor.extent_bytes(slot.item_bytes),
            block_stride: tensor.stride(slot, Axis::Block),
            device: tensor.device,
            writable: tensor.writable,
        };
        let regions = slots.iter().zip(&tensors).map(region).collect();
        let mut placements = Vec::new();
        for (index, (slot, tensor)) in slots.iter().zip(&tensors).enumerate() {
            let planes = plane_places(&engine, rank, slot, tensor);
            for (position, &layer) in slot.layers.iter().enumerate() {
                let layer_offset = position as u64 * tensor.stride(slot, Axis::Layer);
                for (plane, plane_offset, strides) in &planes {
                    let (offset, strides) = (layer_offset + plane_offset, strides.clone());
                    placements
                        .push(((slot.group, layer, *plane), Placement { tensor: index, offset, strides }));
                }
            }
        }
        placements.sort_unstable_by_key(|(place, _)| *place);
        Self { engine, rank, slots, tensors, regions, placements }
    }

    /// Where a plane of a layer lies, if this rank holds it. Whoever asks for one after another is answered at
    /// once: `next` is where the one behind the last was found.
    pub fn placement(&self, place: (usize, u64, usize), next: &mut usize) -> Option<&Placement> {
        let index = match self.placements.get(*next) {
            Some((here, _)) if *here == place => *next,
            _ => self.placements.binary_search_by_key(&place, |(place, _)| *place).ok()?,
        };
        *next = index + 1;
        Some(&self.placements[index].1)
    }

    /// The same with its tensors changed, which must still fit their slots.
    #[must_use]
    pub fn map(mut self, change: impl FnMut(&mut Tensor)) -> Self {
        self.tensors.iter_mut().for_each(change);
        Self::of(self.engine, self.rank, self.slots, self.tensors)
    }

    /// Blocks that a tensor holds.
    pub fn blocks(&self, tensor: usize) -> u64 {
        self.tensors[tensor].sizes[self.slots[tensor].block_axis()]
    }
}

/// One plane of one layer: its place in a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Index of the tensor.
    pub tensor: usize,
    /// Bytes from the tensor's first to the plane's.
    pub offset: u64,
    /// How it lies from there on, mostly as in every other layer.
    pub strides: PlaneStrides,
}

/// How far each axis of a plane steps, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaneStrides {
    /// Bytes from one block to the next.
    pub block_stride: u64,
    /// Bytes from one token slot to the next.
    pub slot_stride: u64,
    /// How the units of the plane lie.
    pub units: UnitPlacement,
}

/// The units of a plane in one slot: heads, or the units of a state part's split axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitPlacement {
    /// First unit that the tensor holds.
    pub first: u64,
    /// Bytes from one unit to the next.
    pub stride: u64,
    /// Items and strides inside a unit, outermost first, around its contiguous runs.
    pub inside: Vec<(u64, u64)>,
    /// Bytes of a contiguous run.
    pub run_bytes: u64,
}

/// The planes that a tensor holds: index, bytes from a layer's first to the plane's, and how it lies.
fn plane_places(
    engine: &Engine,
    rank: usize,
    slot: &TensorSlot,
    tensor: &Tensor,
) -> Vec<(usize, u64, PlaneStrides)> {
    let sharded = &engine.groups[slot.group];
    let first_unit = |facet: usize| sharded.splits[facet].units(engine.tp_rank(rank)).begin;
    let strides = |units: UnitPlacement| PlaneStrides {
        block_stride: tensor.stride(slot, Axis::Block),
        slot_stride: tensor.stride(slot, Axis::Slot),
        units,
    };
    let heads = |items: u64| {
        strides(UnitPlacement {
            first: first_unit(0),
            stride: tensor.stride(slot, Axis::Head),
            inside: Vec::new(),
            run_bytes: items * slot.item_bytes,
        })
    };
    match &sharded.group.kind {
        GroupKind::Attention(attention) => {
            let [key, value] = attention.row_items();
            if slot.layout.has(Axis::Content) {
                return vec![(0, 0, heads(key)), (1, key * slot.item_bytes, heads(value))];
            }
            if slot.layout.has(Axis::Plane) {
                return vec![(0, 0, heads(key)), (1, tensor.stride(slot, Axis::Plane), heads(value))];
            }
            if slot.planes[0] == "K" { vec![(0, 0, heads(key))] } else { vec![(1, 0, heads(value))] }
        }
        GroupKind::Latent(latent) => vec![(0, 0, heads(latent.dtype.items(latent.latent_dim)))],
        GroupKind::State(parts) => {
            let found = parts.iter().enumerate().find(|(_, part)| part.name == slot.planes[0]);
            let (index, part) = found.expect("a state slot is named after its part");
            vec![(index, 0, strides(state_units(part, first_unit(index), slot, tensor)))]
        }
    }
}

/// A unit of a state part: a stretch of its split axis, with all of the other axes.
fn state_units(part: &StatePart, first: u64, slot: &TensorSlot, tensor: &Tensor) -> UnitPlacement {
    let items = part.items();
    let strides = &tensor.strides[1..]; // after the block axis
    let (axis, units) = part.shard.unwrap_or((0, 1));
    let unit_items = items[axis] / units;
    let inside =
        items.iter().zip(strides).enumerate().map(|(index, (&count, &stride))| {
            if index == axis { (unit_items, stride) } else { (count, stride) }
        });
    UnitPlacement {
        first,
        stride: unit_items * strides[axis],
        inside: inside.collect(),
        run_bytes: slot.item_bytes,
    }
}
