//! Blocks by token position: what is due, and which stretches of which blocks hold it.

use crate::error::{Result, counted, fail};
use crate::ids::repeated;
use crate::interval::Interval;
use crate::specs::engine::{Engine, ShardedGroup};
use crate::specs::model::GroupKind;

/// One side's block ids of one group; element `i` covers the slots from `first + i * slots_per_block`.
#[derive(Clone, Copy, Debug)]
pub struct BlockList<'a> {
    /// Whose group it is.
    engine: &'a Engine,
    /// Index of the group in that engine's model.
    group: usize,
    /// Ids as the engine gave them.
    ids: &'a [i64],
    /// Slot position at which the list begins.
    first: u64,
}

/// Consecutive slots that lie in one block on either side; offsets count from the blocks' starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// First slot position in the request; zero for a state, which has none.
    pub position: u64,
    /// Block id of the source.
    pub source_block: u64,
    /// First slot in it.
    pub source_offset: u64,
    /// Block id of the target.
    pub target_block: u64,
    /// First slot in it.
    pub target_offset: u64,
    /// Slots in the stretch.
    pub slots: u64,
}

impl<'a> BlockList<'a> {
    /// Takes a list whose ids are possible block ids: not negative and below `num_blocks` where that is
    /// known, or the null block. `first_token` must be a multiple of the tokens per block.
    pub fn new(engine: &'a Engine, group: usize, ids: &'a [i64], first_token: u64) -> Result<Self> {
        let sharded = &engine.groups[group];
        let limit = sharded.num_blocks.map_or(1 << 63, |blocks| blocks);
        let is_possible = |id: &i64| {
            sharded.null_block_id == Some(*id) || u64::try_from(*id).is_ok_and(|index| index < limit)
        };
        if let Some(id) = ids.iter().find(|id| !is_possible(id)) {
            fail!(
                BlockRange,
                "block id {id} of group {group} of engine {:?} is outside [0, {limit})",
                engine.id
            );
        }
        if sharded.is_state() {
            if ids.len() > 1 {
                fail!(
                    BlockRange,
                    "group {group} of engine {:?} is a state group, which takes one slot id, got {}",
                    engine.id,
                    ids.len()
                );
            }
            return Ok(Self { engine, group, ids, first: 0 });
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

    fn sharded(&self) -> &'a ShardedGroup {
        &self.engine.groups[self.group]
    }

    /// The id at a place, unless it is the null block.
    fn block(&self, id: i64) -> Option<u64> {
        (self.sharded().null_block_id != Some(id)).then_some(id.unsigned_abs())
    }

    /// Starts at a slot position that is due.
    fn cursor(&self, position: u64, due: Interval) -> Result<Cursor> {
        let Some(past_first) = position.checked_sub(self.first) else {
            fail!(
                BlockRange,
                "block ids of group {} of engine {:?} begin at token {}, tokens {} are due",
                self.group,
                self.engine.id,
                self.tokens(self.first),
                Interval::new(self.tokens(position), self.tokens(due.end))
            );
        };
        let slots_per_block = self.sharded().slots_per_block();
        Ok(Cursor { index: past_first / slots_per_block, offset: past_first % slots_per_block })
    }

    /// The id that a cursor stands on.
    fn id_at(&self, cursor: Cursor, due: Interval) -> Result<i64> {
        match usize::try_from(cursor.index).ok().and_then(|index| self.ids.get(index)) {
            Some(id) => Ok(*id),
            None => self.too_few(due),
        }
    }

    fn too_few<T>(&self, due: Interval) -> Result<T> {
        fail!(
            BlockRange,
            "group {} of engine {:?} needs {} from token {} for tokens {}, got {}",
            self.group,
            self.engine.id,
            counted((due.end - self.first).div_ceil(self.sharded().slots_per_block()), "block id"),
            self.tokens(self.first),
            Interval::new(self.tokens(due.begin), self.tokens(due.end)),
            self.ids.len()
        )
    }

    fn tokens(&self, slots: u64) -> u64 {
        slots * self.sharded().group.tokens_per_slot()
    }
}

/// A place in a list: a block, and a slot in it.
#[derive(Clone, Copy)]
struct Cursor {
    index: u64,
    offset: u64,
}

impl Cursor {
    /// Moves on by slots that do not reach past the block's end.
    fn advance(&mut self, slots: u64, slots_per_block: u64) {
        self.offset += slots;
        if self.offset == slots_per_block {
            *self = Self { index: self.index + 1, offset: 0 };
        }
    }
}

/// The slot positions of a token range that a target group is due, before null blocks are left out:
/// not what the target already holds, and for a sliding window only the last of them.
pub fn due(target: &BlockList<'_>, tokens: Interval) -> Result<Interval> {
    let sharded = target.sharded();
    if sharded.is_state() {
        return Ok(Interval::new(0, 0)); // a state has no tokens
    }
    let per_slot = sharded.group.tokens_per_slot();
    if !tokens.begin.is_multiple_of(per_slot) || !tokens.end.is_multiple_of(per_slot) {
        fail!(
            Alignment,
            "token range {tokens} does not align with the {per_slot} tokens a slot of group {} of engine {:?}",
            target.group,
            target.engine.id
        );
    }
    let window = match &sharded.group.kind {
        GroupKind::Attention(attention) => attention.sliding_window,
        GroupKind::Latent(_) | GroupKind::State(_) => None,
    };
    let window_begin = window.map_or(0, |window| tokens.end.saturating_sub(window));
    let begin = tokens.begin.max(window_begin) / per_slot;
    Ok(Interval::new(begin.max(target.first), tokens.end / per_slot))
}

/// Cuts the due slots at the block boundaries of both sides, in order of position. Every due slot that
/// is not in a null block of the target must be in a block of the source.
pub fn stretches(source: &BlockList<'_>, target: &BlockList<'_>, due: Interval) -> Result<Vec<Stretch>> {
    if target.sharded().is_state() {
        return Ok(state_stretch(source, target));
    }
    let (source_size, target_size) = (source.sharded().slots_per_block(), target.sharded().slots_per_block());
    let mut stretches = Vec::new();
    if due.is_empty() {
        return Ok(stretches);
    }
    let mut position = due.begin;
    let mut to = target.cursor(position, due)?;
    let mut from: Option<Cursor> = None;
    while position < due.end {
        let left = (due.end - position).min(target_size - to.offset);
        let Some(target_block) = target.block(target.id_at(to, due)?) else {
            to.advance(left, target_size);
            position += left;
            from = None; // the source need not cover what is skipped
            continue;
        };
        let mut source_at = match from {
            Some(cursor) => cursor,
            None => source.cursor(position, due)?,
        };
        let Some(source_block) = source.block(source.id_at(source_at, due)?) else {
            fail!(
                BlockRange,
                "token {} of group {} of engine {:?} is due, but lies in its null block",
                source.tokens(position),
                source.group,
                source.engine.id
            );
        };
        let slots = left.min(source_size - source_at.offset);
        stretches.push(Stretch {
            position,
            source_block,
            source_offset: source_at.offset,
            target_block,
            target_offset: to.offset,
            slots,
        });
        source_at.advance(slots, source_size);
        from = Some(source_at);
        to.advance(slots, target_size);
        position += slots;
    }
    Ok(stretches)
}

/// A state is one slot that moves when both sides give one.
fn state_stretch(source: &BlockList<'_>, target: &BlockList<'_>) -> Vec<Stretch> {
    let slot = |list: &BlockList<'_>| list.ids.first().and_then(|id| list.block(*id));
    let both = slot(source).zip(slot(target));
    both.map(|(source_block, target_block)| Stretch {
        position: 0,
        source_block,
        source_offset: 0,
        target_block,
        target_offset: 0,
        slots: 1,
    })
    .into_iter()
    .collect()
}

/// Refuses a target list that names one block for two due positions.
pub fn check_distinct(target: &BlockList<'_>, due: Interval) -> Result<()> {
    if due.is_empty() {
        return Ok(());
    }
    let slots_per_block = target.sharded().slots_per_block();
    let place = |position: u64| usize::try_from(position / slots_per_block).unwrap_or(usize::MAX);
    let begin = place(due.begin - target.first);
    let end = place(due.end - target.first + slots_per_block - 1);
    let Some(ids) = target.ids.get(begin..end) else {
        return target.too_few(due);
    };
    let blocks: Vec<u64> = ids.iter().filter_map(|id| target.block(*id)).collect();
    if let Some(twice) = repeated(&blocks) {
        fail!(
            Overlap,
            "block id {twice} of group {} of engine {:?} is the target of two due positions",
            target.group,
            target.engine.id
        );
    }
    Ok(())
}
