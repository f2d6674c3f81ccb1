//! Routes: a pair of engines that has been checked, with everything that no request changes.

use std::ops::Range;
use std::sync::Arc;

use crate::error::Result;
use crate::interval::Interval;
use crate::planning::pairing::{Facet, GroupPair, check_geometry, check_same_layers, shared_layers};
use crate::side::Side;
use crate::specs::engine::Engine;

/// Two engines that can exchange caches.
#[derive(Debug)]
pub struct Route {
    source: Arc<Engine>,
    target: Arc<Engine>,
    pairs: Vec<GroupPair>,
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

    /// The engine at one end.
    pub fn engine(&self, side: Side) -> &Arc<Engine> {
        side.of(&self.source, &self.target)
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
            let holder = pair.holder(self.engine(side), rank);
            for (facet, Facet { shares, .. }) in pair.facets.iter().enumerate() {
                for share in shares.iter().filter(|share| side.of(share.source, share.target) == holder) {
                    for other in self.ranks(pair, side.other(), side.of(share.target, share.source)) {
                        let (source_rank, target_rank) = side.of((rank, other), (other, rank));
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
        let engine = self.engine(side);
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
