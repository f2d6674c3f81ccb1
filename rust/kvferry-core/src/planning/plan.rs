//! Plans: what one rank moves for one request, free of addresses.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Result, counted, fail};
use crate::interval::Interval;
use crate::planning::blocks::{BlockList, Stretch, check_distinct, due, stretches};
use crate::planning::pieces::{Piece, pieces};
use crate::planning::route::{Route, Transfer};
use crate::side::Side;

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

/// What one target rank reads, or one source rank sends, for one request.
#[derive(Debug)]
pub struct Plan {
    route: Arc<Route>,
    end: Side,
    rank: usize,
    /// For each group pair of the route, the stretches of blocks that are due.
    stretches: Vec<Vec<Stretch>>,
    /// For each group pair, its highest source and target block.
    highest: Vec<[u64; 2]>,
    /// By group pair, source CP rank and target CP rank, for those that have tokens in common.
    pieces: BTreeMap<(usize, u64, u64), Vec<Piece>>,
    transfers: Vec<Transfer>,
    num_bytes: u64,
}

impl Plan {
    /// Plans what `rank` reads (as a target) or sends (as a source) of `tokens`. Lists of all groups are
    /// checked, whatever the rank.
    pub fn new(
        route: Arc<Route>,
        (end, rank): (Side, usize),
        source: &RequestBlocks,
        target: &RequestBlocks,
        tokens: Interval,
    ) -> Result<Self> {
        route.engine(end).check_rank(rank)?;
        if tokens.begin > tokens.end || tokens.end > MAX_TOKEN {
            fail!(Value, "token range {tokens} must lie in [0, {MAX_TOKEN}) and not end before it begins");
        }
        let stretches = due_stretches(&route, source, target, tokens)?;
        let mut transfers = route.transfers(end, rank);
        let mut common = BTreeMap::new();
        transfers.retain(|transfer| {
            let key = piece_key(&route, transfer);
            let [source, target] = &route.pairs()[transfer.pair].paging;
            let found = common
                .entry(key)
                .or_insert_with(|| pieces(&stretches[transfer.pair], (source, key.1), (target, key.2)));
            !found.is_empty()
        });
        let highest = |stretches: &Vec<Stretch>| {
            Side::BOTH.map(|side| {
                stretches
                    .iter()
                    .map(|stretch| side.of(stretch.source_block, stretch.target_block))
                    .max()
                    .unwrap_or(0)
            })
        };
        let highest = stretches.iter().map(highest).collect();
        let mut plan = Self { route, end, rank, stretches, highest, pieces: common, transfers, num_bytes: 0 };
        plan.num_bytes = plan.payload_bytes()?;
        Ok(plan)
    }

    /// The pair of engines.
    pub fn route(&self) -> &Arc<Route> {
        &self.route
    }

    /// The end and the rank that it was made for.
    pub fn made_for(&self) -> (Side, usize) {
        (self.end, self.rank)
    }

    /// What is read from whom.
    pub fn transfers(&self) -> &[Transfer] {
        &self.transfers
    }

    /// Stretches of blocks that are due in a group pair, by token position.
    pub fn stretches(&self, pair: usize) -> &[Stretch] {
        &self.stretches[pair]
    }

    /// Pieces of blocks that a transfer moves for every layer and unit.
    pub fn pieces(&self, transfer: &Transfer) -> &[Piece] {
        &self.pieces[&piece_key(&self.route, transfer)]
    }

    /// Names the pieces of a transfer: those of equal keys are the same.
    pub fn piece_key(&self, transfer: &Transfer) -> (usize, u64, u64) {
        piece_key(&self.route, transfer)
    }

    /// The (source rank, target rank) pairs that move bytes, ascending.
    pub fn rank_pairs(&self) -> Vec<(usize, usize)> {
        let ends = |transfer: &Transfer| (transfer.source_rank, transfer.target_rank);
        let mut pairs: Vec<_> = self.transfers.iter().map(ends).collect();
        pairs.sort_unstable();
        pairs.dedup();
        pairs
    }

    /// Of a target's plan, the source ranks that hold what it needs and are not read.
    pub fn notify_only(&self) -> Vec<usize> {
        if self.end == Side::Source {
            return Vec::new();
        }
        let is_read = |rank: usize| self.transfers.iter().any(|transfer| transfer.source_rank == rank);
        self.route.holders(self.rank).into_iter().filter(|rank| !is_read(*rank)).collect()
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
        let pairs = self.route.pairs().iter().enumerate().filter(|(_, pair)| pair.group(side) == group);
        let highest = pairs.map(|(index, _)| self.highest_block(side, index)).max().unwrap_or(0);
        self.route.engine(side).groups[group].num_blocks.unwrap_or(highest.saturating_add(2))
    }

    /// Payload of all transfers; refused where it exceeds what an offset can count.
    fn payload_bytes(&self) -> Result<u64> {
        let transfer_bytes = |transfer: &Transfer| {
            let pair = &self.route.pairs()[transfer.pair];
            let planes = pair.facets[transfer.facet].planes.clone();
            let slots: u128 = self.pieces(transfer).iter().map(|piece| u128::from(piece.shape.total())).sum();
            let unit_bytes: u128 = pair.unit_bytes[planes].iter().copied().map(u128::from).sum();
            slots * unit_bytes * u128::from(transfer.units.len()) * transfer.layers.len() as u128
        };
        let total = self.transfers.iter().map(transfer_bytes).fold(0, u128::saturating_add);
        match i64::try_from(total) {
            Ok(bytes) => Ok(bytes.unsigned_abs()),
            Err(_) => fail!(Value, "a plan of {total} bytes exceeds 2^63"),
        }
    }
}

fn piece_key(route: &Route, transfer: &Transfer) -> (usize, u64, u64) {
    let pair = &route.pairs()[transfer.pair];
    let (source_cp, target_cp) = route.cp_ranks(pair, transfer.source_rank, transfer.target_rank);
    (transfer.pair, source_cp, target_cp)
}

/// For each group pair, the stretches that are due, after every list has been checked.
fn due_stretches(
    route: &Route,
    source: &RequestBlocks,
    target: &RequestBlocks,
    tokens: Interval,
) -> Result<Vec<Vec<Stretch>>> {
    let source = block_lists(route, Side::Source, source)?;
    let target = block_lists(route, Side::Target, target)?;
    let dues = target.iter().map(|list| due(list, tokens)).collect::<Result<Vec<_>>>()?;
    for (list, due) in target.iter().zip(&dues) {
        check_distinct(list, *due)?;
    }
    let of_pair = |pair: &crate::planning::pairing::GroupPair| {
        let (s, t) = (pair.source_group, pair.target_group);
        stretches(&source[s], &target[t], dues[t])
    };
    route.pairs().iter().map(of_pair).collect()
}

fn block_lists<'a>(route: &'a Route, side: Side, blocks: &'a RequestBlocks) -> Result<Vec<BlockList<'a>>> {
    let engine = route.engine(side);
    let groups = engine.groups.len();
    if blocks.ids.len() != groups {
        fail!(
            Value,
            "{side}_blocks has {}, engine {:?} has {}",
            counted(blocks.ids.len(), "list"),
            engine.id,
            counted(groups, "group")
        );
    }
    if blocks.first_tokens.len() != groups {
        fail!(
            Value,
            "{side}_first_token has {}, engine {:?} has {}",
            counted(blocks.first_tokens.len(), "token"),
            engine.id,
            counted(groups, "group")
        );
    }
    if let Some(far) = blocks.first_tokens.iter().find(|first| **first > MAX_TOKEN) {
        fail!(Value, "{side}_first_token {far} is outside [0, {MAX_TOKEN}]");
    }
    (0..groups).map(|g| BlockList::new(engine, g, &blocks.ids[g], blocks.first_tokens[g])).collect()
}
