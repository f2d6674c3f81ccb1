//! Blocks by token position: which tokens are due, and which pieces of which blocks hold them.

use crate::engine::Engine;
use crate::error::{Result, fail};
use crate::interval::Interval;
use crate::model::GroupKind;

/// One side's block ids of one group; element `i` covers the slots from `first + i * slots_per_block`.
#[derive(Clone, Copy, Debug)]
pub struct BlockList<'a> {
    /// Whose group it is, for messages.
    pub engine: &'a Engine,
    /// Index of the group in that engine's model.
    pub group: usize,
    /// Ids as the engine gave them.
    pub ids: &'a [i64],
    /// Slot position at which the list begins.
    pub first: u64,
}

/// Consecutive slots that lie in one block on either side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Block of the source.
    pub source_block: u64,
    /// First slot in it.
    pub source_slot: u64,
    /// Block of the target.
    pub target_block: u64,
    /// First slot in it.
    pub target_slot: u64,
    /// Slots in the piece.
    pub slots: u64,
}

impl<'a> BlockList<'a> {
    /// Takes a list whose ids are possible block ids: not negative and below `num_blocks` where that is
    /// known, or the null block. `first_token` must be a multiple of the tokens per block.
    pub fn new(engine: &'a Engine, group: usize, ids: &'a [i64], first_token: u64) -> Result<Self> {
        let sharded = &engine.groups[group];
        for &id in ids {
            if sharded.null_block_id == Some(id) {
                continue;
            }
            let index = u64::try_from(id).ok();
            if index.is_none_or(|index| sharded.num_blocks.is_some_and(|blocks| index >= blocks)) {
                let limit = sharded.num_blocks.map_or("2^63".into(), |blocks| blocks.to_string());
                fail!(
                    BlockRange,
                    "block id {id} of group {group} of engine {:?} is outside [0, {limit})",
                    engine.id
                );
            }
        }
        let tokens_per_block = sharded.tokens_per_block;
        if !first_token.is_multiple_of(tokens_per_block) {
            fail!(
                Alignment,
                "first token {first_token} of group {group} of engine {:?} does not align with its \
                 {tokens_per_block} tokens a block",
                engine.id
            );
        }
        Ok(Self { engine, group, ids, first: first_token / sharded.group.tokens_per_slot() })
    }

    fn slots_per_block(&self) -> u64 {
        self.engine.groups[self.group].slots_per_block()
    }

    /// Block that covers a slot position, with the positions that it covers; `None`: the null block.
    fn block_at(&self, position: u64, due: Interval) -> Result<(Option<u64>, Interval)> {
        let slots_per_block = self.slots_per_block();
        let tokens_per_slot = self.engine.groups[self.group].group.tokens_per_slot();
        let (group, name) = (self.group, &self.engine.id);
        let tokens = Interval::new(due.begin * tokens_per_slot, due.end * tokens_per_slot);
        let Some(past_first) = position.checked_sub(self.first) else {
            fail!(
                BlockRange,
                "block ids of group {group} of engine {name:?} begin at token {}, tokens {tokens} are due",
                self.first * tokens_per_slot
            );
        };
        let index = past_first / slots_per_block;
        let Some(&id) = usize::try_from(index).ok().and_then(|index| self.ids.get(index)) else {
            fail!(
                BlockRange,
                "group {group} of engine {name:?} needs {} block ids from token {} for tokens {tokens}, got {}",
                (due.end - self.first).div_ceil(slots_per_block),
                self.first * tokens_per_slot,
                self.ids.len()
            );
        };
        let begin = self.first + index * slots_per_block;
        let covered = Interval::new(begin, begin + slots_per_block);
        let is_null = self.engine.groups[group].null_block_id == Some(id);
        Ok(((!is_null).then_some(id.unsigned_abs()), covered))
    }
}

/// The slot positions of `[begin, end)` that a target group is due, before null blocks are left out:
/// not what the target already holds, and for a sliding window only the last of them.
pub fn due(target: &BlockList<'_>, tokens: Interval) -> Result<Interval> {
    let group = &target.engine.groups[target.group].group;
    let per_slot = group.tokens_per_slot();
    if !tokens.begin.is_multiple_of(per_slot) || !tokens.end.is_multiple_of(per_slot) {
        fail!(
            Alignment,
            "token range {tokens} does not align with the {per_slot} tokens a slot of group {} of engine {:?}",
            target.group,
            target.engine.id
        );
    }
    let window_begin = match &group.kind {
        GroupKind::Attention(attention) => {
            attention.sliding_window.map_or(0, |window| tokens.end.saturating_sub(window))
        }
        _ => 0,
    };
    let slots = Interval::new(tokens.begin.max(window_begin) / per_slot, tokens.end / per_slot);
    Ok(Interval::new(slots.begin.max(target.first), slots.end))
}

/// Cuts the due slots at the block boundaries of both sides, in order of position.
pub fn pieces(source: &BlockList<'_>, target: &BlockList<'_>, due: Interval) -> Result<Vec<Piece>> {
    let mut pieces = Vec::new();
    let mut position = due.begin;
    while position < due.end {
        let (target_block, target_covers) = target.block_at(position, due)?;
        let Some(target_block) = target_block else {
            position = target_covers.end;
            continue;
        };
        let (source_block, source_covers) = source.block_at(position, due)?;
        let Some(source_block) = source_block else {
            fail!(
                BlockRange,
                "token {} of group {} of engine {:?} is due, but lies in its null block",
                position * source.engine.groups[source.group].group.tokens_per_slot(),
                source.group,
                source.engine.id
            );
        };
        let end = target_covers.end.min(source_covers.end).min(due.end);
        pieces.push(Piece {
            source_block,
            source_slot: position - source_covers.begin,
            target_block,
            target_slot: position - target_covers.begin,
            slots: end - position,
        });
        position = end;
    }
    Ok(pieces)
}

/// Refuses a target list that names one block for two due positions.
pub fn check_distinct(target: &BlockList<'_>, due: Interval) -> Result<()> {
    let mut blocks = Vec::new();
    let mut position = due.begin;
    while position < due.end {
        let (block, covers) = target.block_at(position, due)?;
        blocks.extend(block);
        position = covers.end;
    }
    blocks.sort_unstable();
    if let Some(twice) = blocks.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]) {
        fail!(
            Overlap,
            "block id {} of group {} of engine {:?} is the target of two due positions",
            twice,
            target.group,
            target.engine.id
        );
    }
    Ok(())
}
