//! Pieces: which slots of a stretch of blocks two ranks have in common, and where in their tensors.

use std::collections::HashMap;

use crate::interval::Interval;
use crate::planning::blocks::Stretch;
use crate::specs::paging::{Paging, Run, gcd};

/// Where a piece begins on one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Block id.
    pub block: u64,
    /// Tensor block, counted from the block id's first.
    pub physical: u64,
    /// Slot in the tensor block.
    pub slot: u64,
}

/// Slots next to each other on both sides, and how often they repeat at equal steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shape {
    /// Consecutive slots.
    pub slots: u64,
    /// How often.
    pub repeats: u64,
    /// Slots from one repetition to the next in the source.
    pub source_step: u64,
    /// Slots from one repetition to the next in the target.
    pub target_step: u64,
}

impl Shape {
    /// Slots of all repetitions.
    pub fn total(&self) -> u64 {
        self.slots * self.repeats
    }
}

/// Slots of one block on either side that one rank reads from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where they begin in the source.
    pub source: Place,
    /// Where they begin in the target.
    pub target: Place,
    /// What they are.
    pub shape: Shape,
}

/// What a source CP rank and a target CP rank have in common of some stretches.
///
/// Ranks of one size each without physical blocks have all of every stretch in common: one piece. In
/// general it depends only on where in its two blocks a stretch lies, and few such cases occur in a
/// request, so each is worked out once.
pub fn pieces(stretches: &[Stretch], source: (&Paging, u64), target: (&Paging, u64)) -> Vec<Piece> {
    let mut fits: HashMap<(u64, u64, u64), Vec<Piece>> = HashMap::new();
    let mut pieces = Vec::with_capacity(stretches.len());
    let case = |stretch: &Stretch| (stretch.source_offset, stretch.target_offset, stretch.slots);
    for alike in stretches.chunk_by(|a, b| case(a) == case(b)) {
        let fit = fits.entry(case(&alike[0])).or_insert_with(|| fit(&alike[0], source, target));
        pieces.extend(alike.iter().flat_map(|stretch| {
            fit.iter().map(|piece| Piece {
                source: Place { block: stretch.source_block, ..piece.source },
                target: Place { block: stretch.target_block, ..piece.target },
                shape: piece.shape,
            })
        }));
    }
    pieces
}

/// The pieces of one stretch: intersections of both ranks' runs, repetitions folded.
fn fit(stretch: &Stretch, source: (&Paging, u64), target: (&Paging, u64)) -> Vec<Piece> {
    let within = |offset: u64| Interval::new(offset, offset + stretch.slots);
    let source_runs = source.0.runs(source.1, within(stretch.source_offset));
    let target_runs = target.0.runs(target.1, within(stretch.target_offset));
    let (mut source_runs, mut target_runs) = (source_runs.peekable(), target_runs.peekable());
    let period = period(source.0, target.0);
    // Repetitions are one common period apart, so each place in the period is folded by itself.
    let mut open: HashMap<u64, usize> = HashMap::new();
    let mut pieces: Vec<Piece> = Vec::new();
    while let (Some(from), Some(to)) = (source_runs.peek(), target_runs.peek()) {
        let (from_at, to_at) = (from.begin - stretch.source_offset, to.begin - stretch.target_offset);
        let (from_end, to_end) = (from_at + from.slots, to_at + to.slots);
        let both = Interval::new(from_at, from_end).intersect(Interval::new(to_at, to_end));
        if !both.is_empty() {
            let place = |run: &Run, at: u64| Place {
                block: 0,
                physical: run.physical,
                slot: run.slot + (both.begin - at),
            };
            let shape = Shape { slots: both.len(), repeats: 1, source_step: 0, target_step: 0 };
            let next = Piece { source: place(from, from_at), target: place(to, to_at), shape };
            let place_in_period = both.begin % period;
            let folds = open.get(&place_in_period).is_some_and(|index| pieces[*index].repeat(&next));
            if !folds {
                open.insert(place_in_period, pieces.len());
                pieces.push(next);
            }
        }
        if from_end <= to_end {
            source_runs.next();
        }
        if to_end <= from_end {
            target_runs.next();
        }
    }
    pieces
}

/// Slots after which both sides' ranks stand to each other as before.
fn period(source: &Paging, target: &Paging) -> u64 {
    let divisor = gcd(source.period(), target.period());
    (source.period() / divisor).saturating_mul(target.period())
}

impl Piece {
    /// Takes `next` as a repetition if it is one; says whether it was.
    fn repeat(&mut self, next: &Self) -> bool {
        let same_blocks =
            (self.source.physical, self.target.physical) == (next.source.physical, next.target.physical);
        if !same_blocks || self.shape.slots != next.shape.slots {
            return false;
        }
        let shape = &mut self.shape;
        let apart = (next.source.slot - self.source.slot, next.target.slot - self.target.slot);
        if shape.repeats == 1 {
            (shape.source_step, shape.target_step) = apart;
        }
        let fits = apart == (shape.repeats * shape.source_step, shape.repeats * shape.target_step);
        shape.repeats += u64::from(fits);
        fits
    }
}
