//! Pairing: whether two engines' groups stand for the same layers in the same geometry.

use crate::engine::{Engine, ShardedGroup};
use crate::error::{Result, fail};
use crate::model::{Attention, Group, GroupKind};
use crate::route::{GroupPair, Side};

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
