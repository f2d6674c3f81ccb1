//! The registered tensors of one rank, and where in them each layer's planes lie.

use std::collections::HashMap;
use std::sync::Arc;

use crate::engine::Engine;
use crate::error::{Result, fail};
use crate::layout::Axis;
use crate::model::GroupKind;
use crate::slot::Slot;
use crate::tensor::{RawTensor, Tensor};

/// One rank's tensors, checked against the slots that its engine's layout asks for.
#[derive(Clone, Debug)]
pub struct RankCache {
    /// The engine whose rank it is.
    pub engine: Arc<Engine>,
    /// Global rank.
    pub rank: usize,
    /// What each tensor holds.
    pub slots: Vec<Slot>,
    /// The tensors, in slot order.
    pub tensors: Vec<Tensor>,
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
                "rank {rank} of engine {:?} registers {} tensors, got {}",
                engine.id,
                slots.len(),
                tensors.len()
            );
        }
        let register = |(slot, raw): (&Slot, &RawTensor)| {
            let axes = axes.get(slot.group).and_then(Option::as_deref);
            Tensor::register(slot, raw, axes)
        };
        let tensors = slots.iter().zip(tensors).map(register).collect::<Result<Vec<_>>>()?;
        Ok(Self { engine, rank, slots, tensors })
    }

    /// Tensors without padding, with so many blocks a group.
    pub fn dense(engine: Arc<Engine>, rank: usize, blocks: impl Fn(usize) -> u64) -> Result<Self> {
        let slots = engine.slots(rank)?;
        let dense = |slot: &Slot| {
            let physical = engine.groups[slot.group].physical_blocks_per_block;
            match blocks(slot.group).checked_mul(physical) {
                Some(blocks) => Tensor::dense(slot, blocks),
                None => fail!(Value, "tensor {:?} has more than 2^64 blocks", slot.name),
            }
        };
        let tensors = slots.iter().map(dense).collect::<Result<Vec<_>>>()?;
        Ok(Self { engine, rank, slots, tensors })
    }

    /// Bytes from a tensor's first to one past its last.
    pub fn extent_bytes(&self, tensor: usize) -> u64 {
        self.tensors[tensor].extent_bytes(self.slots[tensor].item_bytes)
    }

    /// Blocks that a tensor holds.
    pub fn blocks(&self, tensor: usize) -> u64 {
        self.tensors[tensor].sizes[self.slots[tensor].block_axis()]
    }
}

/// One plane of one layer: its place in a tensor and how far each axis steps, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Index of the tensor.
    pub tensor: usize,
    /// Bytes from the tensor's first to the plane's.
    pub offset: u64,
    /// Bytes from one block to the next.
    pub block_stride: u64,
    /// Bytes from one token slot to the next.
    pub slot_stride: u64,
    /// Bytes from one head to the next.
    pub head_stride: u64,
    /// First head that the tensor holds.
    pub first_head: u64,
}

/// The placements of one rank, by group, layer and plane.
#[derive(Debug)]
pub struct Placements(HashMap<(usize, u64, usize), Placement>);

impl Placements {
    /// Works out where each layer's planes lie.
    pub fn new(cache: &RankCache) -> Self {
        let mut placements = HashMap::new();
        for (index, (slot, tensor)) in cache.slots.iter().zip(&cache.tensors).enumerate() {
            let sharded = &cache.engine.groups[slot.group];
            let units = sharded.split.units(cache.engine.tp_rank(cache.rank));
            let plane_offsets = plane_offsets(&sharded.group.kind, slot, tensor);
            for (position, &layer) in slot.layers.iter().enumerate() {
                let layer_offset = position as u64 * tensor.stride(slot, Axis::Layer);
                for &(plane, plane_offset) in &plane_offsets {
                    let placement = Placement {
                        tensor: index,
                        offset: layer_offset + plane_offset,
                        block_stride: tensor.stride(slot, Axis::Block),
                        slot_stride: tensor.stride(slot, Axis::Slot),
                        head_stride: tensor.stride(slot, Axis::Head),
                        first_head: units.begin,
                    };
                    placements.insert((slot.group, layer, plane), placement);
                }
            }
        }
        Self(placements)
    }

    /// Where a plane lies, if this rank holds the layer.
    pub fn find(&self, group: usize, layer: u64, plane: usize) -> Option<Placement> {
        self.0.get(&(group, layer, plane)).copied()
    }
}

/// The planes that a tensor holds, with the bytes from a layer's first to theirs.
fn plane_offsets(kind: &GroupKind, slot: &Slot, tensor: &Tensor) -> Vec<(usize, u64)> {
    let GroupKind::Attention(attention) = kind else {
        return vec![(0, 0)];
    };
    if slot.layout.has(Axis::Content) {
        return vec![(0, 0), (1, attention.row_items()[0] * slot.item_bytes)];
    }
    if slot.layout.has(Axis::Plane) {
        return vec![(0, 0), (1, tensor.stride(slot, Axis::Plane))];
    }
    vec![(usize::from(slot.planes[0] == "V"), 0)]
}
