//! Routes: a pair of engines that has been checked, with everything that no request changes.

use std::fmt;
use std::sync::Arc;

use crate::blocks::Piece;
use crate::engine::{Engine, ShardedGroup};
use crate::error::{Result, fail};
use crate::interval::Interval;
use crate::model::{Attention, Group, GroupKind};
use crate::shard::{Share, shares};

/// Two engines that can exchange caches.
#[derive(Debug)]
pub struct Route {
    source: Arc<Engine>,
    target: Arc<Engine>,
    pairs: Vec<GroupPair>,
}

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
    pub row_bytes: Vec<u64>,
    shares: Vec<Share>,
}

/// Units of a group pair that one rank reads from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Rank that is read.
    pub source_rank: usize,
    /// Rank that is written.
    pub target_rank: usize,
    /// Index of the [`GroupPair`].
    pub pair: usize,
    /// Units, as intervals of the whole model's.
    pub units: Interval,
}

/// The two ends of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// Read.
    Source,
    /// Written.
    Target,
}

impl Side {
    /// The engine at this end.
    pub fn engine(self, route: &Route) -> &Arc<Engine> {
        match self {
            Self::Source => &route.source,
            Self::Target => &route.target,
        }
    }

    /// The group at this end.
    pub fn group(self, pair: &GroupPair) -> usize {
        match self {
            Self::Source => pair.source_group,
            Self::Target => pair.target_group,
        }
    }

    /// The block at this end.
    pub fn block(self, piece: &Piece) -> u64 {
        match self {
            Self::Source => piece.source_block,
            Self::Target => piece.target_block,
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Target => "target",
        })
    }
}

impl Route {
    /// Pairs two engines, or says why they can never exchange caches.
    pub fn new(source: Arc<Engine>, target: Arc<Engine>, allow_missing_layers: bool) -> Result<Self> {
        let mut pairs = Vec::new();
        for (t, target_group) in target.groups.iter().enumerate() {
            for (s, source_group) in source.groups.iter().enumerate() {
                let layers = shared_layers(&source_group.group, &target_group.group);
                if !layers.is_empty() {
                    check_geometry(&source, s, &target, t, layers[0])?;
                    pairs.push(GroupPair {
                        source_group: s,
                        target_group: t,
                        layers,
                        row_bytes: row_bytes(&target_group.group),
                        shares: shares(&source_group.split, &target_group.split),
                    });
                }
            }
        }
        if !allow_missing_layers {
            check_same_layers(&source, &target, &pairs)?;
        }
        check_supported(&source)?;
        check_supported(&target)?;
        Ok(Self { source, target, pairs })
    }

    /// The engine that is read.
    pub fn source(&self) -> &Arc<Engine> {
        &self.source
    }

    /// The engine that is written.
    pub fn target(&self) -> &Arc<Engine> {
        &self.target
    }

    /// Groups with layers in common, by target group and then source group.
    pub fn pairs(&self) -> &[GroupPair] {
        &self.pairs
    }

    /// Target ranks that need anything that a source rank holds, whoever they read it from.
    pub fn readers(&self, source_rank: usize) -> Result<Vec<usize>> {
        self.source.check_rank(source_rank)?;
        let needs = |target_rank: &usize| self.shares_elements(source_rank, *target_rank);
        Ok((0..self.target.num_ranks()).filter(needs).collect())
    }

    /// Source ranks that hold anything that a target rank needs.
    pub fn holders(&self, target_rank: usize) -> Vec<usize> {
        let holds = |source_rank: &usize| self.shares_elements(*source_rank, target_rank);
        (0..self.source.num_ranks()).filter(holds).collect()
    }

    /// What a target rank reads and from whom, ordered by pair, source and unit.
    pub fn transfers_to(&self, target_rank: usize) -> Vec<Transfer> {
        let tp_rank = self.target.tp_rank(target_rank);
        let mut transfers = Vec::new();
        for (index, pair) in self.pairs.iter().enumerate() {
            for share in pair.shares.iter().filter(|share| share.target == tp_rank) {
                let (pair, units) = (index, share.units);
                transfers.push(Transfer { source_rank: share.source, target_rank, pair, units });
            }
        }
        transfers
    }

    fn shares_elements(&self, source_rank: usize, target_rank: usize) -> bool {
        let (source_tp, target_tp) = (self.source.tp_rank(source_rank), self.target.tp_rank(target_rank));
        self.pairs.iter().any(|pair| {
            let held = self.source.groups[pair.source_group].split.units(source_tp);
            held.overlaps(self.target.groups[pair.target_group].split.units(target_tp))
        })
    }
}

/// A state lives beside a layer's attention, so the two never stand for each other.
fn may_pair(source: &Group, target: &Group) -> bool {
    let is_state = |group: &Group| matches!(group.kind, GroupKind::State(_));
    is_state(source) == is_state(target)
}

fn shared_layers(source: &Group, target: &Group) -> Vec<u64> {
    if !may_pair(source, target) {
        return Vec::new();
    }
    let shared = |layer: &u64| source.layers.binary_search(layer).is_ok();
    target.layers.iter().copied().filter(shared).collect()
}

fn row_bytes(group: &Group) -> Vec<u64> {
    match &group.kind {
        GroupKind::Attention(attention) => {
            attention.row_items().map(|items| items * attention.dtype.item_bytes()).into()
        }
        GroupKind::Latent(_) | GroupKind::State(_) => Vec::new(),
    }
}

fn check_geometry(source: &Engine, s: usize, target: &Engine, t: usize, layer: u64) -> Result<()> {
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

fn check_same_layers(source: &Engine, target: &Engine, pairs: &[GroupPair]) -> Result<()> {
    let is_paired = |side: Side, g: usize, layer: u64| {
        pairs.iter().any(|pair| side.group(pair) == g && pair.layers.binary_search(&layer).is_ok())
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

/// Names what this version does not plan yet.
fn check_supported(engine: &Engine) -> Result<()> {
    let id = &engine.id;
    for (g, sharded) in engine.groups.iter().enumerate() {
        let kind = &sharded.group.kind;
        if !matches!(kind, GroupKind::Attention(_)) {
            fail!(
                NotSupported,
                "routes over {} groups are not supported yet (group {g} of engine {id:?})",
                kind.word()
            );
        }
        if sharded.physical_blocks_per_block > 1 {
            fail!(
                NotSupported,
                "routes with physical_blocks_per_block > 1 are not supported yet (engine {id:?})"
            );
        }
    }
    if engine.stages.len() > 1 {
        fail!(NotSupported, "routes with pp_size > 1 are not supported yet (engine {id:?})");
    }
    if engine.cp_size > 1 {
        fail!(NotSupported, "routes with cp_size > 1 are not supported yet (engine {id:?})");
    }
    Ok(())
}
