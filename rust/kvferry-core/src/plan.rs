//! Plans: what one target rank moves for one request, free of addresses.

use std::sync::Arc;

use crate::blocks::{BlockList, Piece, check_distinct, due, pieces};
use crate::error::{Result, fail};
use crate::interval::Interval;
use crate::route::{Route, Side, Transfer};

/// Bound on token positions, so that sums of positions never overflow.
pub const MAX_TOKEN: u64 = 1 << 62;

/// One side's block ids of a request.
#[derive(Clone, Debug)]
pub struct RequestBlocks {
    /// Ids a group of that side's model.
    pub ids: Vec<Vec<i64>>,
    /// First token that each group's list covers.
    pub first_tokens: Vec<u64>,
}

/// What one target rank reads for one request.
#[derive(Debug)]
pub struct Plan {
    route: Arc<Route>,
    target_rank: usize,
    /// For each group pair of the route, the pieces of blocks that are due.
    pieces: Vec<Vec<Piece>>,
    /// For each group pair, the highest source and target block among its pieces.
    highest: Vec<[u64; 2]>,
    transfers: Vec<Transfer>,
    num_bytes: u64,
}

impl Plan {
    /// Plans what `target_rank` needs of `tokens`. Lists of all groups are checked, whatever the rank.
    pub fn new(
        route: Arc<Route>,
        target_rank: usize,
        source: &RequestBlocks,
        target: &RequestBlocks,
        tokens: Interval,
    ) -> Result<Self> {
        route.target().check_rank(target_rank)?;
        if tokens.begin > tokens.end || tokens.end > MAX_TOKEN {
            fail!(Value, "token range {tokens} must lie in [0, {MAX_TOKEN}) and not end before it begins");
        }
        let source = block_lists(&route, Side::Source, source)?;
        let target = block_lists(&route, Side::Target, target)?;
        let dues = target.iter().map(|list| due(list, tokens)).collect::<Result<Vec<_>>>()?;
        for (list, due) in target.iter().zip(&dues) {
            check_distinct(list, *due)?;
        }
        let pieces = route
            .pairs()
            .iter()
            .map(|pair| {
                let g = pair.target_group;
                pieces(&source[pair.source_group], &target[g], dues[g])
            })
            .collect::<Result<Vec<_>>>()?;
        let mut transfers = route.transfers_to(target_rank);
        transfers.retain(|transfer| !pieces[transfer.pair].is_empty());
        let num_bytes = payload_bytes(&route, &pieces, &transfers)?;
        let highest = |side: Side, pieces: &Vec<Piece>| pieces.iter().map(|piece| side.block(piece)).max();
        let ends = |pieces| [Side::Source, Side::Target].map(|side| highest(side, pieces).unwrap_or(0));
        let highest = pieces.iter().map(ends).collect();
        Ok(Self { route, target_rank, pieces, highest, transfers, num_bytes })
    }

    /// The pair of engines.
    pub fn route(&self) -> &Arc<Route> {
        &self.route
    }

    /// The rank that it was made for.
    pub fn target_rank(&self) -> usize {
        self.target_rank
    }

    /// What is read from whom.
    pub fn transfers(&self) -> &[Transfer] {
        &self.transfers
    }

    /// Pieces of blocks that are due in a group pair, by token position.
    pub fn pieces(&self, pair: usize) -> &[Piece] {
        &self.pieces[pair]
    }

    /// The (source rank, target rank) pairs that move bytes, ascending.
    pub fn rank_pairs(&self) -> Vec<(usize, usize)> {
        let ends = |transfer: &Transfer| (transfer.source_rank, transfer.target_rank);
        let mut pairs: Vec<_> = self.transfers.iter().map(ends).collect();
        pairs.sort_unstable();
        pairs.dedup();
        pairs
    }

    /// Source ranks that hold what the target rank needs and are not read.
    pub fn notify_only(&self) -> Vec<usize> {
        let is_read = |rank: usize| self.transfers.iter().any(|transfer| transfer.source_rank == rank);
        self.route.holders(self.target_rank).into_iter().filter(|rank| !is_read(*rank)).collect()
    }

    /// Payload bytes.
    pub fn num_bytes(&self) -> u64 {
        self.num_bytes
    }

    /// The highest block that a group pair moves at one end, zero where it moves none.
    pub fn highest_block(&self, side: Side, pair: usize) -> u64 {
        self.highest[pair][side as usize]
    }

    /// Blocks of a group that dense tensors must have for the plan to lie inside them: `num_blocks`
    /// where the engine says so, else the highest id that is moved plus two.
    pub fn block_count(&self, side: Side, group: usize) -> u64 {
        let pairs = self.route.pairs().iter().enumerate().filter(|(_, pair)| side.group(pair) == group);
        let highest = pairs.map(|(index, _)| self.highest_block(side, index)).max().unwrap_or(0);
        side.engine(&self.route).groups[group].num_blocks.unwrap_or(highest.saturating_add(2))
    }
}

/// Payload of some transfers; refused where it exceeds what an offset can count.
fn payload_bytes(route: &Route, pieces: &[Vec<Piece>], transfers: &[Transfer]) -> Result<u64> {
    let transfer_bytes = |transfer: &Transfer| {
        let pair = &route.pairs()[transfer.pair];
        let slots: u128 = pieces[transfer.pair].iter().map(|piece| u128::from(piece.slots)).sum();
        let rows = u128::from(transfer.units.len()) * pair.layers.len() as u128;
        slots * rows * u128::from(pair.row_bytes.iter().sum::<u64>())
    };
    let total = transfers.iter().map(transfer_bytes).fold(0, u128::saturating_add);
    match i64::try_from(total) {
        Ok(bytes) => Ok(bytes.unsigned_abs()),
        Err(_) => fail!(Value, "a plan of {total} bytes exceeds 2^63"),
    }
}

fn block_lists<'a>(route: &'a Route, side: Side, blocks: &'a RequestBlocks) -> Result<Vec<BlockList<'a>>> {
    let engine = side.engine(route);
    let groups = engine.groups.len();
    if blocks.ids.len() != groups {
        fail!(
            Value,
            "{side}_blocks has {} lists, engine {:?} has {groups} groups",
            blocks.ids.len(),
            engine.id
        );
    }
    if blocks.first_tokens.len() != groups {
        fail!(
            Value,
            "{side}_first_token has {} entries, engine {:?} has {groups} groups",
            blocks.first_tokens.len(),
            engine.id
        );
    }
    if let Some(far) = blocks.first_tokens.iter().find(|first| **first > MAX_TOKEN) {
        fail!(Value, "{side}_first_token {far} is outside [0, {MAX_TOKEN}]");
    }
    (0..groups).map(|g| BlockList::new(engine, g, &blocks.ids[g], blocks.first_tokens[g])).collect()
}
