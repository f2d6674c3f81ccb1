//! Pairing: whether two engines' groups stand for the same layers in the same geometry.

use std::ops::Range;

use crate::error::{Result, fail};
use crate::side::Side;
use crate::specs::engine::{Engine, ShardedGroup};
use crate::specs::model::{Attention, Group, GroupKind};
use crate::specs::paging::Paging;
use crate::specs::shard::{Share, Split, shares};

/// Layers that a group of the source and a group of the target have in common.
#[derive(Debug)]
pub struct GroupPair {
    /// Group of the source's model.
    pub source_group: usize,
    /// Group of the target's model.
    pub target_group: usize,
    /// Layers in both, ascending.
    pub layers: Vec<u64>,
    /// Bytes of one unit in one slot, a plane.
    pub unit_bytes: Vec<u64>,
    /// Planes that are split alike.
    pub facets: Vec<Facet>,
    /// How either side pages its blocks.
    pub paging: [Paging; 2],
    /// Whether CP ranks hold different tokens; else, as for states, each holds all.
    pub(crate) by_tokens: bool,
}

/// Planes that are split alike over the ranks of a stage: TP ranks where CP ranks split the tokens,
/// all of a stage's ranks where each CP rank holds all.
#[derive(Debug)]
pub struct Facet {
    /// The planes.
    pub planes: Range<usize>,
    pub(crate) splits: [Split; 2],
    pub(crate) shares: Vec<Share>,
}

impl GroupPair {
    /// Pairs two groups of the same geometry.
    pub(crate) fn new(
        source: &Engine,
        s: usize,
        target: &Engine,
        t: usize,
        layers: Vec<u64>,
    ) -> Result<Self> {
        let (source_group, target_group) = (&source.groups[s], &target.groups[t]);
        let by_tokens = !target_group.is_state();
        let facet = |facet: usize| {
            let split = |engine: &Engine, split: &Split| {
                if by_tokens { split.clone() } else { split.repeated(engine.cp_size) }
            };
            let splits =
                [split(source, &source_group.splits[facet]), split(target, &target_group.splits[facet])];
            let shares = shares(&splits[0], &splits[1])?;
            Ok(Facet { planes: target_group.facet_planes(facet), splits, shares })
        };
        Ok(Self {
            source_group: s,
            target_group: t,
            layers,
            unit_bytes: unit_bytes(&target_group.group),
            facets: (0..target_group.splits.len()).map(facet).collect::<Result<_>>()?,
            paging: [source.paging(s), target.paging(t)],
            by_tokens,
        })
    }

    /// The group at one end.
    pub fn group(&self, side: Side) -> usize {
        side.of(self.source_group, self.target_group)
    }

    /// Who holds units: a TP rank where CP ranks split the tokens, else each rank of the stage.
    pub(crate) fn holder(&self, engine: &Engine, rank: usize) -> usize {
        if self.by_tokens { engine.tp_rank(rank) } else { rank % engine.stage_ranks() }
    }
}

fn unit_bytes(group: &Group) -> Vec<u64> {
    group.planes().iter().map(|plane| plane.unit_bytes).collect()
}

/// A state lives beside a layer's attention, so the two never stand for each other.
fn may_pair(source: &Group, target: &Group) -> bool {
    let is_state = |group: &Group| matches!(group.kind, GroupKind::State(_));
    is_state(source) == is_state(target)
}

/// Layers that two groups have in common.
pub fn shared_layers(source: &Group, target: &Group) -> Vec<u64> {
    if !may_pair(source, target) {
        return Vec::new();
    }
    let shared = |layer: &u64| source.layers.binary_search(layer).is_ok();
    target.layers.iter().copied().filter(shared).collect()
}

/// Two groups with a layer in common must cache it alike.
pub fn check_geometry(source: &Engine, s: usize, target: &Engine, t: usize, layer: u64) -> Result<()> {
    let (ours, theirs) = (&source.groups[s].group.kind, &target.groups[t].group.kind);
    if ours == theirs {
        return Ok(());
    }
    let difference = match (ours, theirs) {
        (GroupKind::Attention(ours), GroupKind::Attention(theirs)) => attention_difference(ours, theirs),
        _ if ours.word() == theirs.word() => format!("{ours:?} against {theirs:?}"),
        _ => format!("{} against {}", ours.word(), theirs.word()),
    };
    fail!(
        Incompatible,
        "layer {layer} of engine {:?} (group {s}) and engine {:?} (group {t}) differ: {difference}",
        source.id,
        target.id
    )
}

fn attention_difference(ours: &Attention, theirs: &Attention) -> String {
    let window =
        |attention: &Attention| attention.sliding_window.map_or("-1".to_owned(), |window| window.to_string());
    let fields = [
        ("num_kv_heads", ours.num_kv_heads.to_string(), theirs.num_kv_heads.to_string()),
        ("head_dim", ours.head_dims[0].to_string(), theirs.head_dims[0].to_string()),
        ("v_head_dim", ours.head_dims[1].to_string(), theirs.head_dims[1].to_string()),
        ("dtype", ours.dtype.name().to_owned(), theirs.dtype.name().to_owned()),
        ("sliding_window", window(ours), window(theirs)),
        ("tokens_per_slot", ours.tokens_per_slot.to_string(), theirs.tokens_per_slot.to_string()),
    ];
    let differs = |(name, ours, theirs): &(&str, String, String)| {
        (ours != theirs).then(|| format!("{name} {ours} against {theirs}"))
    };
    fields.iter().filter_map(differs).collect::<Vec<_>>().join(", ")
}

/// Every layer must be in a pair on either side.
pub fn check_same_layers(source: &Engine, target: &Engine, pairs: &[GroupPair]) -> Result<()> {
    let is_paired = |side: Side, g: usize, layer: u64| {
        pairs.iter().any(|pair| pair.group(side) == g && pair.layers.binary_search(&layer).is_ok())
    };
    for (side, engine, other) in [(Side::Source, source, target), (Side::Target, target, source)] {
        for (g, ShardedGroup { group, .. }) in engine.groups.iter().enumerate() {
            if let Some(layer) = group.layers.iter().find(|layer| !is_paired(side, g, **layer)) {
                fail!(
                    Incompatible,
                    "layer {layer} ({}) of engine {:?} is missing in engine {:?}; pass \
                     allow_missing_layers=True to leave such layers out",
                    group.kind.word(),
                    engine.id,
                    other.id
                );
            }
        }
    }
    Ok(())
}
