//! What a model caches: groups of layers, and the planes that each layer keeps per slot.

use crate::error::{Result, fail};
use crate::specs::dtype::Dtype;

/// Bound on layer indices, heads and elements: far above any model, far below overflow.
pub const MAX_DIMENSION: u64 = 1 << 31;

/// Bound on the axes of a state part; no tensor library has more.
pub const MAX_PART_AXES: usize = 63;
/// Bound on the elements of a state part, so that its bytes are easily counted.
pub const MAX_PART_ITEMS: u64 = 1 << 48;

/// Layers that share one block-id space and one geometry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Global layer indices, ascending.
    pub layers: Vec<u64>,
    /// What each of these layers caches.
    pub kind: GroupKind,
}

/// The kinds of cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// A key and a value a head and token.
    Attention(Attention),
    /// One latent vector a token, the same on every TP rank.
    Latent(Latent),
    /// One state a sequence.
    State(Vec<StatePart>),
}

/// Geometry of ordinary attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attention {
    /// KV heads of the whole model.
    pub num_kv_heads: u64,
    /// Elements of a head's key and value.
    pub head_dims: [u64; 2],
    /// Element type.
    pub dtype: Dtype,
    /// Window in tokens; `None` for full attention.
    pub sliding_window: Option<u64>,
    /// Tokens that one slot stands for.
    pub tokens_per_slot: u64,
}

/// Geometry of latent attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Latent {
    /// Elements of the latent vector.
    pub latent_dim: u64,
    /// Element type.
    pub dtype: Dtype,
    /// Tokens that one slot stands for.
    pub tokens_per_slot: u64,
}

/// One tensor of a recurrent state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatePart {
    /// Unique inside its group.
    pub name: String,
    /// The whole model's shape.
    pub shape: Vec<u64>,
    /// Element type.
    pub dtype: Dtype,
    /// The split axis with its number of equal units; `None` where every rank holds all.
    pub shard: Option<(usize, u64)>,
}

/// What a layer keeps per slot in one plane, as units that ranks hold whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plane {
    /// Units of the whole model: heads, or one where every rank holds all.
    pub units: u64,
    /// Bytes of one unit.
    pub unit_bytes: u64,
}

impl StatePart {
    /// Tensor items along each axis of the whole model's part.
    pub fn items(&self) -> Vec<u64> {
        let mut items = self.shape.clone();
        if let Some(innermost) = items.last_mut() {
            *innermost = self.dtype.items(*innermost);
        }
        items
    }

    fn plane(&self) -> Plane {
        let units = self.shard.map_or(1, |(_, units)| units);
        // `check_parts` bounds the product.
        Plane { units, unit_bytes: self.items().iter().product::<u64>() * self.dtype.item_bytes() / units }
    }
}

impl Group {
    /// Checks layers and geometry.
    pub fn new(mut layers: Vec<u64>, kind: GroupKind) -> Result<Self> {
        if layers.is_empty() {
            fail!(Value, "layers is empty; a group has at least one layer");
        }
        layers.sort_unstable();
        if let Some(twice) = layers.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]) {
            fail!(Value, "layers names layer {twice} twice");
        }
        in_bounds("layers", layers[layers.len() - 1], 0)?;
        kind.check()?;
        Ok(Self { layers, kind })
    }

    /// The planes of each layer, in registration order.
    pub fn planes(&self) -> Vec<Plane> {
        match &self.kind {
            GroupKind::Attention(attention) => {
                let item_bytes = attention.dtype.item_bytes();
                let plane =
                    |items: u64| Plane { units: attention.num_kv_heads, unit_bytes: items * item_bytes };
                attention.row_items().map(plane).into()
            }
            GroupKind::Latent(latent) => {
                let unit_bytes = latent.dtype.items(latent.latent_dim) * latent.dtype.item_bytes();
                vec![Plane { units: 1, unit_bytes }]
            }
            GroupKind::State(parts) => parts.iter().map(StatePart::plane).collect(),
        }
    }

    /// What users call these planes.
    pub fn plane_names(&self) -> Vec<&str> {
        match &self.kind {
            GroupKind::Attention(_) => vec!["K", "V"],
            GroupKind::Latent(_) => vec!["latent"],
            GroupKind::State(parts) => parts.iter().map(|part| part.name.as_str()).collect(),
        }
    }

    /// Tokens that one slot stands for; a state has no tokens, hence one.
    pub fn tokens_per_slot(&self) -> u64 {
        match &self.kind {
            GroupKind::Attention(attention) => attention.tokens_per_slot,
            GroupKind::Latent(latent) => latent.tokens_per_slot,
            GroupKind::State(_) => 1,
        }
    }
}

impl GroupKind {
    /// The word that users know the kind by.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Attention(_) => "attention",
            Self::Latent(_) => "latent",
            Self::State(_) => "state",
        }
    }

    fn check(&self) -> Result<()> {
        match self {
            Self::Attention(attention) => attention.check(),
            Self::Latent(latent) => {
                in_bounds("latent_dim", latent.latent_dim, 1)?;
                in_bounds("tokens_per_slot", latent.tokens_per_slot, 1)?;
                latent.dtype.check_packing("latent_dim", latent.latent_dim)
            }
            Self::State(parts) => check_parts(parts),
        }
    }
}

impl Attention {
    /// Tensor items of one head's key and value in one slot.
    pub fn row_items(&self) -> [u64; 2] {
        self.head_dims.map(|dim| self.dtype.items(dim))
    }

    fn check(&self) -> Result<()> {
        in_bounds("num_kv_heads", self.num_kv_heads, 1)?;
        in_bounds("tokens_per_slot", self.tokens_per_slot, 1)?;
        for (field, dim) in ["head_dim", "v_head_dim"].into_iter().zip(self.head_dims) {
            in_bounds(field, dim, 1)?;
            self.dtype.check_packing(field, dim)?;
        }
        if let Some(window) = self.sliding_window {
            in_bounds("sliding_window", window, 1)?;
            if !window.is_multiple_of(self.tokens_per_slot) {
                fail!(
                    Value,
                    "sliding_window={window} must be a multiple of tokens_per_slot={}",
                    self.tokens_per_slot
                );
            }
        }
        Ok(())
    }
}

fn check_parts(parts: &[StatePart]) -> Result<()> {
    if parts.is_empty() {
        fail!(Value, "parts is empty; a state has at least one part");
    }
    for (index, part) in parts.iter().enumerate() {
        let name = &part.name;
        if parts[..index].iter().any(|other| other.name == *name) {
            fail!(Value, "parts names {name:?} twice");
        }
        let Some(&innermost) = part.shape.last() else {
            fail!(Value, "shape of part {name:?} is empty");
        };
        if part.shape.len() > MAX_PART_AXES {
            fail!(Value, "shape of part {name:?} has {} axes, more than {MAX_PART_AXES}", part.shape.len());
        }
        for &size in &part.shape {
            in_bounds(&format!("shape of part {name:?}"), size, 1)?;
        }
        part.dtype.check_packing(&format!("innermost size of part {name:?}"), innermost)?;
        let items = part.shape.iter().try_fold(1_u64, |items, size| items.checked_mul(*size));
        if items.is_none_or(|items| items > MAX_PART_ITEMS) {
            fail!(Value, "shape {:?} of part {name:?} has more than {MAX_PART_ITEMS} elements", part.shape);
        }
        if let Some((axis, units)) = part.shard {
            let Some(&size) = part.shape.get(axis) else {
                fail!(Value, "shard_axis={axis} of part {name:?} is outside [0, {})", part.shape.len());
            };
            if units == 0 || !size.is_multiple_of(units) {
                fail!(Value, "shard_units={units} of part {name:?} does not divide its axis of {size}");
            }
            if axis + 1 == part.shape.len() {
                part.dtype.check_packing(&format!("one unit of part {name:?}"), size / units)?;
            }
        }
    }
    Ok(())
}

/// Checks that a dimension is at least `least` and small enough to multiply safely.
pub(crate) fn in_bounds(field: &str, value: u64, least: u64) -> Result<()> {
    if value < least || value > MAX_DIMENSION {
        fail!(Value, "{field}: {value} is outside [{least}, {MAX_DIMENSION}]");
    }
    Ok(())
}

/// Checks a model's groups together.
pub fn check_model(groups: &[Group]) -> Result<()> {
    if groups.is_empty() {
        fail!(Value, "groups is empty; a model has at least one group");
    }
    // A layer may have a state beside its attention (parallel hybrids), but only one of each.
    for wants_state in [false, true] {
        let mut seen: Vec<(u64, usize)> = groups
            .iter()
            .enumerate()
            .filter(|(_, group)| matches!(group.kind, GroupKind::State(_)) == wants_state)
            .flat_map(|(g, group)| group.layers.iter().map(move |&layer| (layer, g)))
            .collect();
        seen.sort_unstable();
        let twice = seen.windows(2).map(|pair| (pair[0], pair[1])).find(|(one, other)| one.0 == other.0);
        if let Some((one, other)) = twice {
            fail!(Value, "layer {} is in groups {} and {}", one.0, one.1, other.1);
        }
    }
    Ok(())
}
