//! Engine groups: which of a group's block ids cover a token range, and which layers draw from which
//! group.

use crate::error::{Result, counted, fail};
use crate::interval::Interval;

/// What stands for the engine group of a layer that no KV group names.
pub const EXCLUDED_ENGINE_GROUP: i64 = -1;
/// Bound on engine groups: many times the layers of any model, while a list a group stays small.
pub const MAX_ENGINE_GROUPS: usize = 1 << 16;
/// Bound on the layers of an engine, and on those that KV groups name together: 8 MiB of them.
pub const MAX_LAYERS: usize = 1 << 20;

/// Layers of one engine group that are copied together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGroup {
    /// The block-id space that they share; checked by [`engine_group`].
    pub engine_group: usize,
    /// As the engine stated them, unsorted, possibly repeated.
    pub layers: Vec<i64>,
}

/// An engine group id as an index.
pub fn engine_group(id: i64) -> Result<usize> {
    match usize::try_from(id) {
        Ok(group) if group < MAX_ENGINE_GROUPS => Ok(group),
        _ => fail!(Value, "engine group id {id} is outside [0, {MAX_ENGINE_GROUPS})"),
    }
}

/// The lists that a request needs, one an engine group, holes included; a model without groups has one.
pub fn num_engine_groups(engine_groups: impl Iterator<Item = usize>) -> usize {
    engine_groups.max().map_or(1, |highest| highest + 1)
}

/// The layers of each engine group, ascending; one that several KV groups name comes as often.
pub fn engine_group_layers(groups: &[KvGroup]) -> Vec<Vec<i64>> {
    if groups.is_empty() {
        return Vec::new();
    }
    let mut layers = vec![Vec::new(); num_engine_groups(groups.iter().map(|group| group.engine_group))];
    for group in groups {
        layers[group.engine_group].extend_from_slice(&group.layers);
    }
    for layers in &mut layers {
        layers.sort_unstable();
    }
    layers
}

/// The engine group of each of `num_layers` layers, the last that claims it; nothing where there are no
/// groups or no layers. With `strict`, two engine groups must not claim one layer.
pub fn engine_group_of_layers(
    groups: &[KvGroup],
    num_layers: usize,
    strict: bool,
) -> Result<Option<Vec<i64>>> {
    if num_layers > MAX_LAYERS {
        fail!(Value, "{num_layers} registered layers are more than {MAX_LAYERS}");
    }
    if groups.is_empty() || num_layers == 0 {
        return Ok(None);
    }
    let mut owners = vec![EXCLUDED_ENGINE_GROUP; num_layers];
    for KvGroup { engine_group, layers } in groups {
        // At most `MAX_ENGINE_GROUPS`, so that it always fits.
        let claims = i64::try_from(*engine_group).unwrap_or(i64::MAX);
        for &layer in layers {
            let Some(owner) = usize::try_from(layer).ok().and_then(|layer| owners.get_mut(layer)) else {
                return Err(outside_layers(layer, *engine_group, num_layers));
            };
            if strict && ![EXCLUDED_ENGINE_GROUP, claims].contains(owner) {
                fail!(Overlap, "layer {layer} is claimed by engine groups {owner} and {claims}");
            }
            *owner = claims;
        }
    }
    Ok(Some(owners))
}

/// The error of a layer that is not registered.
pub fn outside_layers(layer: impl std::fmt::Display, engine_group: usize, num_layers: usize) -> crate::Error {
    crate::Error::BlockRange(format!(
        "layer {layer} of engine group {engine_group} is outside registered layer range [0, {num_layers})"
    ))
}

/// Which elements of a group's id list cover a token range; empty where the range is backwards.
pub fn ids_of_tokens(group: usize, tokens: Interval, tokens_per_block: u64) -> Result<Interval> {
    if tokens_per_block == 0 {
        fail!(Value, "tokens per block of group {group} is 0, not positive");
    }
    let Interval { begin, end } = tokens;
    if begin % tokens_per_block != 0 || end % tokens_per_block != 0 {
        fail!(
            Alignment,
            "token range {tokens} does not align to group {group} of {tokens_per_block} tokens per block"
        );
    }
    Ok(Interval::new(begin / tokens_per_block, end / tokens_per_block))
}

/// Of the elements `needed` for some tokens those that a list of `held` ids has, with `strict` all.
pub fn held_of_needed(
    group: usize,
    tokens: Interval,
    needed: Interval,
    held: u64,
    strict: bool,
) -> Result<Interval> {
    if strict && !needed.is_empty() && needed.end > held {
        fail!(
            BlockRange,
            "group {group} needs {} for token range {tokens}, held {held}",
            counted(needed.end, "block id")
        );
    }
    let begin = needed.begin.min(held);
    Ok(Interval::new(begin, needed.end.clamp(begin, held)))
}
