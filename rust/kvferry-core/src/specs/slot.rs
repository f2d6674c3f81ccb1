//! Tensor slots: the tensors that a rank registers, with the sizes that they must have.

use crate::error::{Result, fail};
use crate::specs::engine::{Engine, ShardedGroup};
use crate::specs::layout::{Axis, Layout};
use crate::specs::model::{Attention, Group, GroupKind, StatePart};

/// One tensor that a rank registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSlot {
    /// Unique on its rank.
    pub name: String,
    /// Index of the group in the engine's model.
    pub group: usize,
    /// Layers that it holds, ascending.
    pub layers: Vec<u64>,
    /// What it holds of each: `K` and `V`, one of them, `latent`, or a state part's name.
    pub planes: Vec<String>,
    /// Its axes, outermost first.
    pub layout: Layout,
    /// Size of each axis in tensor items; the block axis's entry is the least that it may have.
    pub sizes: Vec<u64>,
    /// Bytes of one tensor item.
    pub item_bytes: u64,
}

impl TensorSlot {
    /// Where the block axis is.
    pub fn block_axis(&self) -> usize {
        self.axis(Axis::Block).unwrap_or_default() // every layout names B
    }

    /// Refuses sizes that no tensor can have, even with one block.
    fn check_size(&self) -> Result<()> {
        let items = self.sizes.iter().try_fold(1_u64, |items, size| items.checked_mul((*size).max(1)));
        let bytes = items.and_then(|items| items.checked_mul(self.item_bytes));
        match bytes.map(i64::try_from) {
            Some(Ok(_)) => Ok(()),
            _ => fail!(Value, "tensor {:?} of sizes {:?} exceeds 2^63 bytes", self.name, self.sizes),
        }
    }

    /// Where an axis is.
    pub fn axis(&self, axis: Axis) -> Option<usize> {
        self.layout.axes().iter().position(|other| *other == axis)
    }
}

impl Engine {
    /// The tensors that a rank registers, in registration order: groups in order, layers ascending,
    /// key before value, state parts in their order.
    pub fn slots(&self, rank: usize) -> Result<Vec<TensorSlot>> {
        self.check_rank(rank)?;
        let stage = self.stage_layers(rank);
        let mut slots = Vec::new();
        for (g, sharded) in self.groups.iter().enumerate() {
            let held = |layer: &u64| stage.begin <= *layer && *layer < stage.end;
            let layers: Vec<u64> = sharded.group.layers.iter().copied().filter(held).collect();
            if layers.is_empty() {
                continue;
            }
            let family = Family { engine: self, tp_rank: self.tp_rank(rank), g, sharded };
            match &sharded.layout {
                Some(layout) if layout.has(Axis::Layer) => {
                    slots.extend(family.slots(&format!("group{g}"), &layers)?);
                }
                _ => {
                    for layer in layers {
                        slots.extend(family.slots(&format!("layers.{layer}"), &[layer])?);
                    }
                }
            }
        }
        Ok(slots)
    }
}

/// The slots of one group on one rank.
struct Family<'a> {
    engine: &'a Engine,
    tp_rank: usize,
    g: usize,
    sharded: &'a ShardedGroup,
}

impl Family<'_> {
    /// The slots of one layer, or of several that share tensors.
    fn slots(&self, name: &str, layers: &[u64]) -> Result<Vec<TensorSlot>> {
        let Group { kind, .. } = &self.sharded.group;
        let slots = match (kind, &self.sharded.layout) {
            (GroupKind::Attention(attention), Some(layout)) => {
                self.attention(name, layers, attention, layout)
            }
            (GroupKind::Latent(latent), Some(layout)) => {
                let items = latent.dtype.items(latent.latent_dim);
                vec![self.slot(name.into(), layers, &["latent"], layout, items, latent.dtype.item_bytes())]
            }
            (GroupKind::State(parts), _) => {
                parts.iter().enumerate().map(|(index, part)| self.state(name, layers, index, part)).collect()
            }
            _ => unreachable!("only state groups have no layout"),
        };
        for slot in &slots {
            slot.check_size()?;
        }
        Ok(slots)
    }

    fn attention(
        &self,
        name: &str,
        layers: &[u64],
        attention: &Attention,
        layout: &Layout,
    ) -> Vec<TensorSlot> {
        let item_bytes = attention.dtype.item_bytes();
        let [key, value] = attention.row_items();
        if layout.has(Axis::Content) {
            return vec![self.slot(name.into(), layers, &["K", "V"], layout, key + value, item_bytes)];
        }
        if layout.joins_planes() {
            return vec![self.slot(name.into(), layers, &["K", "V"], layout, key, item_bytes)];
        }
        [("K", key), ("V", value)]
            .map(|(plane, items)| {
                self.slot(format!("{name}.{plane}"), layers, &[plane], layout, items, item_bytes)
            })
            .into()
    }

    fn slot(
        &self,
        name: String,
        layers: &[u64],
        planes: &[&str],
        layout: &Layout,
        row_items: u64,
        item_bytes: u64,
    ) -> TensorSlot {
        let sharded = self.sharded;
        let size = |axis: &Axis| match axis {
            Axis::Layer => layers.len() as u64,
            Axis::Block => sharded.num_blocks.unwrap_or(0) * sharded.physical_blocks_per_block,
            Axis::Plane => planes.len() as u64,
            Axis::Slot => self.engine.paging(self.g).slots_per_physical(),
            Axis::Head => sharded.splits[0].units(self.tp_rank).len(),
            Axis::Dim | Axis::Content | Axis::State => row_items,
        };
        TensorSlot {
            name,
            group: self.g,
            layers: layers.to_vec(),
            planes: planes.iter().map(|plane| (*plane).to_owned()).collect(),
            sizes: layout.axes().iter().map(size).collect(),
            layout: layout.clone(),
            item_bytes,
        }
    }

    fn state(&self, name: &str, layers: &[u64], index: usize, part: &StatePart) -> TensorSlot {
        let mut items = part.items();
        if let Some((axis, units)) = part.shard {
            items[axis] = items[axis] / units * self.sharded.splits[index].units(self.tp_rank).len();
        }
        let blocks = self.sharded.num_blocks.unwrap_or(0);
        TensorSlot {
            name: format!("{name}.state.{}", part.name),
            group: self.g,
            layers: layers.to_vec(),
            planes: vec![part.name.clone()],
            layout: Layout::state(items.len()),
            sizes: std::iter::once(blocks).chain(items).collect(),
            item_bytes: part.dtype.item_bytes(),
        }
    }
}
