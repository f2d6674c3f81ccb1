//! Routes: a pair of engines that has been checked, with everything that no request changes.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::blocks::Stretch;
use crate::engine::Engine;
use crate::error::Result;
use crate::interval::Interval;
use crate::model::Group;
use crate::paging::Paging;
use crate::pairing::{check_geometry, check_same_layers, shared_layers};
use crate::shard::{Share, Split, shares};

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
    pub unit_bytes: Vec<u64>,
    /// Planes that are split alike.
    pub facets: Vec<Facet>,
    /// How either side pages its blocks.
    pub paging: [Paging; 2],
    /// Whether CP ranks hold different tokens; else, as for states, each holds all.
    by_tokens: bool,
}

/// Planes that are split alike over the ranks of a stage: TP ranks where CP ranks split the tokens,
/// all of a stage's ranks where each CP rank holds all.
#[derive(Debug)]
pub struct Facet {
    /// The planes.
    pub planes: Range<usize>,
    splits: [Split; 2],
    shares: Vec<Share>,
}

/// Units of a facet that one rank reads from another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Rank that is read.
    pub source_rank: usize,
    /// Rank that is written.
    pub target_rank: usize,
    /// Index of the [`GroupPair`].
    pub pair: usize,
    /// Index of its [`Facet`].
    pub facet: usize,
    /// Units, as intervals of the whole model's.
    pub units: Interval,
    /// The pair's layers that both ranks' pipeline stages hold.
    pub layers: Range<usize>,
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
    /// Both, source first.
    pub const BOTH: [Self; 2] = [Self::Source, Self::Target];

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

    /// The rank at this end.
    pub fn rank(self, transfer: &Transfer) -> usize {
        match self {
            Self::Source => transfer.source_rank,
            Self::Target => transfer.target_rank,
        }
    }

    /// The block at this end.
    pub fn block(self, stretch: &Stretch) -> u64 {
        match self {
            Self::Source => stretch.source_block,
            Self::Target => stretch.target_block,
        }
    }

    /// The holder at this end.
    fn holder(self, share: &Share) -> usize {
        match self {
            Self::Source => share.source,
            Self::Target => share.target,
        }
    }

    /// The end that it is not.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Source => Self::Target,
            Self::Target => Self::Source,
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
                    pairs.push(GroupPair::new(&source, s, &target, t, layers)?);
                }
            }
        }
        if !allow_missing_layers {
            check_same_layers(&source, &target, &pairs)?;
        }
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

    /// What moves to (`Side::Target`) or from (`Side::Source`) a rank, whatever the request.
    pub fn transfers(&self, side: Side, rank: usize) -> Vec<Transfer> {
        let mut transfers = Vec::new();
        for (index, pair) in self.pairs.iter().enumerate() {
            let holder = pair.holder(side.engine(self), rank);
            for (facet, Facet { shares, .. }) in pair.facets.iter().enumerate() {
                for share in shares.iter().filter(|share| side.holder(share) == holder) {
                    for other in self.ranks(pair, side.other(), side.other().holder(share)) {
                        let (source_rank, target_rank) = match side {
                            Side::Source => (rank, other),
                            Side::Target => (other, rank),
                        };
                        let layers = self.layers(pair, source_rank, target_rank);
                        if !layers.is_empty() && self.meets(pair, source_rank, target_rank) {
                            let (pair, units) = (index, share.units);
                            transfers.push(Transfer { source_rank, target_rank, pair, facet, units, layers });
                        }
                    }
                }
            }
        }
        transfers
    }

    /// Global ranks, in all stages and on all CP ranks that it stands for, of one holder.
    fn ranks(&self, pair: &GroupPair, side: Side, holder: usize) -> impl Iterator<Item = usize> {
        let engine = side.engine(self);
        let in_stage = if pair.by_tokens {
            holder * engine.cp_size..(holder + 1) * engine.cp_size
        } else {
            holder..holder + 1
        };
        let per_stage = engine.stage_ranks();
        (0..engine.stages.len())
            .flat_map(move |stage| in_stage.clone().map(move |rank| stage * per_stage + rank))
    }

    /// The pair's layers that both ranks' stages hold.
    fn layers(&self, pair: &GroupPair, source_rank: usize, target_rank: usize) -> Range<usize> {
        let held = self.source.stage_layers(source_rank).intersect(self.target.stage_layers(target_rank));
        let place = |layer: u64| pair.layers.partition_point(|other| *other < layer);
        place(held.begin)..place(held.end.max(held.begin))
    }

    /// Whether some token position lies on both ranks.
    fn meets(&self, pair: &GroupPair, source_rank: usize, target_rank: usize) -> bool {
        let (source_cp, target_cp) = self.cp_ranks(pair, source_rank, target_rank);
        pair.paging[0].meets(source_cp, &pair.paging[1], target_cp)
    }

    /// The CP ranks that say which tokens two ranks hold; zero where each holds all.
    pub fn cp_ranks(&self, pair: &GroupPair, source_rank: usize, target_rank: usize) -> (u64, u64) {
        if !pair.by_tokens {
            return (0, 0);
        }
        (self.source.cp_rank(source_rank) as u64, self.target.cp_rank(target_rank) as u64)
    }

    fn shares_elements(&self, source_rank: usize, target_rank: usize) -> bool {
        self.pairs.iter().any(|pair| {
            let source_holder = pair.holder(&self.source, source_rank);
            let target_holder = pair.holder(&self.target, target_rank);
            let shares_units = |Facet { splits: [source, target], .. }: &Facet| {
                source.units(source_holder).overlaps(target.units(target_holder))
            };
            !self.layers(pair, source_rank, target_rank).is_empty()
                && self.meets(pair, source_rank, target_rank)
                && pair.facets.iter().any(shares_units)
        })
    }
}

impl GroupPair {
    fn new(source: &Engine, s: usize, target: &Engine, t: usize, layers: Vec<u64>) -> Result<Self> {
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

    /// Who holds units: a TP rank where CP ranks split the tokens, else each rank of the stage.
    fn holder(&self, engine: &Engine, rank: usize) -> usize {
        if self.by_tokens { engine.tp_rank(rank) } else { rank % engine.stage_ranks() }
    }
}

fn unit_bytes(group: &Group) -> Vec<u64> {
    group.planes().iter().map(|plane| plane.unit_bytes).collect()
}
