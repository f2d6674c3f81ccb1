//! One engine: how a model's groups are cut into ranks, blocks and tensors.

use std::ops::Range;

use crate::error::{Result, counted, fail};
use crate::interval::Interval;
use crate::specs::layout::{Axis, Layout};
use crate::specs::model::{Group, GroupKind, check_model, in_bounds};
use crate::specs::paging::Paging;
use crate::specs::shard::Split;

/// Bound on an engine's ranks, so that work per rank pair stays small.
pub const MAX_RANKS: usize = 1 << 14;

/// A value given once for all groups, or once a group.
#[derive(Clone, Debug)]
pub enum PerGroup<T> {
    /// The same for every group.
    Same(T),
    /// One entry a group.
    Each(Vec<T>),
}

impl<T: Clone> PerGroup<T> {
    fn resolve(&self, field: &str, groups: usize) -> Result<Vec<T>> {
        match self {
            Self::Same(value) => Ok(vec![value.clone(); groups]),
            Self::Each(values) if values.len() == groups => Ok(values.clone()),
            Self::Each(values) => {
                let (held, groups) = (counted(values.len(), "value"), counted(groups, "group"));
                fail!(Value, "{field} has {held} for {groups}")
            }
        }
    }
}

/// An engine as its user states it; see the fields of the same names in the Python `EngineSpec`.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // documented where users read them
pub struct EngineFields {
    pub engine_id: String,
    pub groups: Vec<Group>,
    pub tokens_per_block: PerGroup<u64>,
    pub layout: PerGroup<String>,
    pub tp_size: usize,
    pub pp_size: usize,
    pub cp_size: usize,
    pub cp_interleave: u64,
    pub pp_layers: Option<Vec<Interval>>,
    pub head_ranges: PerGroup<Option<Vec<Interval>>>,
    pub null_block_id: PerGroup<Option<i64>>,
    pub physical_blocks_per_block: PerGroup<u64>,
    pub num_blocks: PerGroup<Option<u64>>,
}

/// An engine whose every field makes sense together with the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Engine {
    /// Names the engine to its peers.
    pub id: String,
    /// Tensor-parallel size.
    pub tp_size: usize,
    /// Context-parallel size.
    pub cp_size: usize,
    /// Consecutive tokens that stay on one CP rank.
    pub cp_interleave: u64,
    /// The layers of each pipeline stage.
    pub stages: Vec<Interval>,
    /// The model's groups, and how each is laid out.
    pub groups: Vec<ShardedGroup>,
}

/// A group with this engine's way of holding it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardedGroup {
    /// What is cached.
    pub group: Group,
    /// How its tensors are laid out; `None` for a state group, whose parts differ.
    pub layout: Option<Layout>,
    /// Units a TP rank, for each facet: planes that are split alike.
    pub splits: Vec<Split>,
    /// Tokens that one block id covers over all CP ranks.
    pub tokens_per_block: u64,
    /// The id that stands for "no block".
    pub null_block_id: Option<i64>,
    /// Consecutive tensor blocks that one block id stands for.
    pub physical_blocks_per_block: u64,
    /// Block ids, where the engine says how many.
    pub num_blocks: Option<u64>,
}

impl ShardedGroup {
    /// Slots that one block id covers over all CP ranks; a state is one slot.
    pub fn slots_per_block(&self) -> u64 {
        if self.is_state() { 1 } else { self.tokens_per_block / self.group.tokens_per_slot() }
    }

    /// Whether it holds states, which have no tokens.
    pub fn is_state(&self) -> bool {
        matches!(self.group.kind, GroupKind::State(_))
    }

    /// The planes of each facet: a key and its value are split alike, each part of a state by itself.
    pub fn facet_planes(&self, facet: usize) -> Range<usize> {
        if self.is_state() { facet..facet + 1 } else { 0..self.group.planes().len() }
    }
}

impl Engine {
    /// Checks every field; an error names the one that makes no sense.
    pub fn new(fields: &EngineFields) -> Result<Self> {
        let EngineFields { engine_id, groups, tp_size, pp_size, cp_size, cp_interleave, .. } = fields;
        check_model(groups)?;
        for (field, size) in [("tp_size", *tp_size), ("pp_size", *pp_size), ("cp_size", *cp_size)] {
            if size == 0 || size > MAX_RANKS {
                fail!(Value, "{field}={size} is outside [1, {MAX_RANKS}]");
            }
        }
        if tp_size * pp_size * cp_size > MAX_RANKS {
            fail!(Value, "tp_size * pp_size * cp_size exceeds {MAX_RANKS} ranks");
        }
        in_bounds("cp_interleave", *cp_interleave, 1)?;
        let stages = stages(fields.pp_layers.as_deref(), *pp_size, groups)?;
        let sharded = shard_groups(fields)?;
        Ok(Self {
            id: engine_id.clone(),
            tp_size: *tp_size,
            cp_size: *cp_size,
            cp_interleave: *cp_interleave,
            stages,
            groups: sharded,
        })
    }

    /// Global ranks.
    pub fn num_ranks(&self) -> usize {
        self.tp_size * self.cp_size * self.stages.len()
    }

    /// Checks that a global rank exists.
    pub fn check_rank(&self, rank: usize) -> Result<()> {
        if rank >= self.num_ranks() {
            fail!(Value, "rank {rank} of engine {:?} is outside [0, {})", self.id, self.num_ranks());
        }
        Ok(())
    }

    /// Ranks of one pipeline stage.
    pub fn stage_ranks(&self) -> usize {
        self.tp_size * self.cp_size
    }

    /// The CP rank of a global rank.
    pub fn cp_rank(&self, rank: usize) -> usize {
        rank % self.cp_size
    }

    /// How a group's blocks are spread over CP ranks and tensor blocks.
    pub fn paging(&self, group: usize) -> Paging {
        let sharded = &self.groups[group];
        let slots_per_block = sharded.slots_per_block();
        if sharded.is_state() {
            return Paging { slots_per_block, cp_size: 1, interleave: 1, physical_blocks: 1 };
        }
        let interleave = match self.cp_size {
            1 => slots_per_block,
            _ => self.cp_interleave / sharded.group.tokens_per_slot(),
        };
        let physical_blocks = sharded.physical_blocks_per_block;
        Paging { slots_per_block, cp_size: self.cp_size as u64, interleave, physical_blocks }
    }

    /// The TP rank of a global rank: `rank = (pp * tp_size + tp) * cp_size + cp`.
    pub fn tp_rank(&self, rank: usize) -> usize {
        rank / self.cp_size % self.tp_size
    }

    /// The layers of a global rank's pipeline stage.
    pub fn stage_layers(&self, rank: usize) -> Interval {
        self.stages[rank / self.cp_size / self.tp_size]
    }
}

/// The layers of each pipeline stage; the last one may reach past the last cached layer.
fn stages(given: Option<&[Interval]>, pp_size: usize, groups: &[Group]) -> Result<Vec<Interval>> {
    let last = |group: &Group| group.layers[group.layers.len() - 1];
    let num_layers = 1 + groups.iter().map(last).max().unwrap_or(0);
    let Some(given) = given else {
        if !num_layers.is_multiple_of(pp_size as u64) {
            fail!(
                Value,
                "pp_layers is required: pp_size={pp_size} does not divide {}",
                counted(num_layers, "layer")
            );
        }
        let size = num_layers / pp_size as u64;
        return Ok((0..pp_size as u64).map(|pp| Interval::new(pp * size, (pp + 1) * size)).collect());
    };
    if given.len() != pp_size {
        fail!(Value, "pp_layers has {} for pp_size={pp_size}", counted(given.len(), "stage"));
    }
    let mut next = 0;
    for (stage, layers) in given.iter().enumerate() {
        if layers.begin != next || layers.is_empty() {
            fail!(Value, "pp_layers of stage {stage} is {layers}; it must begin at {next} and hold a layer");
        }
        next = layers.end;
    }
    if next < num_layers {
        fail!(Value, "pp_layers ends at {next}, before the last of {}", counted(num_layers, "layer"));
    }
    Ok(given.to_vec())
}

fn shard_groups(fields: &EngineFields) -> Result<Vec<ShardedGroup>> {
    let count = fields.groups.len();
    let tokens_per_block = fields.tokens_per_block.resolve("tokens_per_block", count)?;
    let layouts = layouts(&fields.layout, &fields.groups)?;
    let head_ranges = fields.head_ranges.resolve("head_ranges", count)?;
    let null_block_id = fields.null_block_id.resolve("null_block_id", count)?;
    let physical = fields.physical_blocks_per_block.resolve("physical_blocks_per_block", count)?;
    let num_blocks = fields.num_blocks.resolve("num_blocks", count)?;
    // A split stated once is that of every attention group; stated for a group, it must be one.
    let stated_once = matches!(fields.head_ranges, PerGroup::Same(_));
    (0..count)
        .map(|g| {
            let group = &fields.groups[g];
            let sharded = ShardedGroup {
                group: group.clone(),
                layout: layouts[g].clone(),
                splits: splits(group, g, head_ranges[g].as_ref(), stated_once, fields.tp_size)?,
                tokens_per_block: tokens_per_block[g],
                null_block_id: null_block_id[g],
                physical_blocks_per_block: physical[g],
                num_blocks: num_blocks[g],
            };
            sharded.check(g, fields)?;
            Ok(sharded)
        })
        .collect()
}

impl ShardedGroup {
    fn check(&self, g: usize, fields: &EngineFields) -> Result<()> {
        in_bounds(&format!("num_blocks of group {g}"), self.num_blocks.unwrap_or(1), 1)?;
        if self.is_state() {
            return Ok(());
        }
        let (tokens, physical) = (self.tokens_per_block, self.physical_blocks_per_block);
        in_bounds(&format!("tokens_per_block of group {g}"), tokens, 1)?;
        in_bounds(&format!("physical_blocks_per_block of group {g}"), physical, 1)?;
        let (cp, interleave) = (fields.cp_size as u64, fields.cp_interleave);
        let per_slot = self.group.tokens_per_slot();
        if !tokens.is_multiple_of(cp * interleave) && cp > 1 {
            fail!(
                Value,
                "tokens_per_block={tokens} of group {g} must be a multiple of cp_size * cp_interleave = {cp} * {interleave}"
            );
        }
        if cp > 1 && !interleave.is_multiple_of(per_slot) {
            fail!(
                Value,
                "cp_interleave={interleave} must be a multiple of tokens_per_slot={per_slot} of group {g}"
            );
        }
        let granule = u128::from(cp) * u128::from(physical) * u128::from(per_slot);
        if !u128::from(tokens).is_multiple_of(granule) {
            fail!(
                Value,
                "tokens_per_block={tokens} of group {g} must be a multiple of cp_size * \
                 physical_blocks_per_block * tokens_per_slot = {cp} * {physical} * {per_slot}"
            );
        }
        Ok(())
    }
}

/// Units a TP rank, a facet. A latent vector is one unit that every rank holds.
fn splits(
    group: &Group,
    g: usize,
    ranges: Option<&Vec<Interval>>,
    stated_once: bool,
    tp_size: usize,
) -> Result<Vec<Split>> {
    match (&group.kind, ranges) {
        (GroupKind::Attention(attention), Some(ranges)) => {
            let field = format!("head_ranges of group {g}");
            Ok(vec![Split::given(&field, ranges.clone(), attention.num_kv_heads, tp_size)?])
        }
        (kind, Some(_)) if !stated_once => {
            fail!(Value, "head_ranges of group {g} must be None: a {} group has no heads", kind.word())
        }
        (GroupKind::State(_), _) => {
            Ok(group.planes().iter().map(|plane| Split::even(plane.units, tp_size)).collect())
        }
        _ => Ok(vec![Split::even(group.planes()[0].units, tp_size)]),
    }
}

/// The layout of each group; `None` for state groups, whose layout is fixed.
fn layouts(given: &PerGroup<String>, groups: &[Group]) -> Result<Vec<Option<Layout>>> {
    let given = match given {
        PerGroup::Same(text) => {
            let layout = Layout::parse(text)?;
            let is_attention = |group: &Group| matches!(group.kind, GroupKind::Attention(_));
            let has_attention = groups.iter().any(is_attention);
            if !has_attention && !layout.has(Axis::Head) && layout != Layout::latent() {
                fail!(
                    Layout,
                    "layout {text:?} is that of attention groups, of which there are none; give a tuple \
                     with one layout a group"
                );
            }
            PerGroup::Same(text.clone())
        }
        PerGroup::Each(_) => given.clone(),
    };
    let stated_once = matches!(given, PerGroup::Same(_));
    let texts = given.resolve("layout", groups.len())?;
    texts.iter().zip(groups).enumerate().map(|(g, (text, group))| match &group.kind {
        GroupKind::Attention(attention) => {
            let layout = Layout::parse(text)?;
            check_attention_letters(text, &layout)?;
            let [key, value] = attention.head_dims;
            if layout.has(Axis::Plane) && key != value {
                fail!(
                    Layout,
                    "layout {text:?} of group {g} has one K axis for head_dim={key} and v_head_dim={value}; \
                     use C, or a tensor for each"
                );
            }
            Ok(Some(layout))
        }
        GroupKind::Latent(_) if stated_once => Ok(Some(Layout::latent())),
        GroupKind::Latent(_) => {
            let layout = Layout::parse(text)?;
            if layout.axes().iter().any(|axis| matches!(axis, Axis::Plane | Axis::Head | Axis::Content)) {
                fail!(Layout, "layout {text:?} of group {g}: a latent group has no K, H or C axis");
            }
            Ok(Some(layout))
        }
        GroupKind::State(_) if stated_once || text == "BS" => Ok(None),
        GroupKind::State(_) => fail!(Layout, "layout {text:?} of group {g}: a state group is always \"BS\""),
    }).collect()
}

fn check_attention_letters(text: &str, layout: &Layout) -> Result<()> {
    if !layout.has(Axis::Head) {
        fail!(Layout, "layout {text:?} has no H axis, which an attention group needs");
    }
    Ok(())
}
