//! Paging: on which context-parallel rank, and where in its tensor, a slot of a block lies.

use crate::interval::Interval;

/// How an engine spreads the slots of one block id over its CP ranks and its tensors' blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paging {
    /// Slots that one block id covers over all CP ranks.
    pub slots_per_block: u64,
    /// Context-parallel size.
    pub cp_size: u64,
    /// Consecutive slots that stay on one CP rank.
    pub interleave: u64,
    /// Consecutive tensor blocks that one block id stands for.
    pub physical_blocks: u64,
}

/// Consecutive slots of one block that lie next to each other in one tensor block of one CP rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First slot, counted over all CP ranks from the block's start.
    pub begin: u64,
    /// Slots.
    pub slots: u64,
    /// Tensor block, counted from the block id's first.
    pub physical: u64,
    /// Where in the tensor block the first slot lies.
    pub slot: u64,
}

impl Paging {
    /// Slots after which the same CP rank is due again.
    pub fn period(&self) -> u64 {
        self.cp_size * self.interleave
    }

    /// Slots in one tensor block of one CP rank.
    pub fn slots_per_physical(&self) -> u64 {
        self.slots_per_block / (self.cp_size * self.physical_blocks)
    }

    /// Whether some token position lies on `rank` here and on `other_rank` there.
    ///
    /// Positions of a rank are `begin + i * period + x` with `0 <= x < interleave`. Two such sets meet
    /// where the difference of their `x` equals that of their begins modulo both periods' divisor.
    pub fn meets(&self, rank: u64, other: &Self, other_rank: u64) -> bool {
        let divisor = i128::from(gcd(self.period(), other.period()));
        let (ours, theirs) = (i128::from(self.interleave), i128::from(other.interleave));
        let apart = i128::from(rank) * ours - i128::from(other_rank) * theirs;
        // The least difference `x_theirs - x_ours` above `-interleave` that fits must be below the other's.
        let least = 1 - ours;
        least + (apart - least).rem_euclid(divisor) < theirs
    }

    /// The runs of one CP rank among the slots `within` a block, in order.
    pub fn runs(&self, rank: u64, within: Interval) -> impl Iterator<Item = Run> {
        let (period, interleave, size) = (self.period(), self.interleave, self.slots_per_physical());
        let first = within.begin / period;
        let last = within.end.div_ceil(period);
        (first..last).flat_map(move |turn| {
            let begin = turn * period + rank * interleave;
            let held = Interval::new(begin, begin + interleave).intersect(within);
            let local = turn * interleave + held.begin.saturating_sub(begin);
            cut(held, local, size)
        })
    }
}

/// Cuts consecutive slots where their tensor block ends.
fn cut(held: Interval, local: u64, size: u64) -> impl Iterator<Item = Run> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let left = held.len() - done;
        let at = local + done;
        let slots = left.min(size - at % size);
        let run = Run { begin: held.begin + done, slots, physical: at / size, slot: at % size };
        done += slots;
        (slots > 0).then_some(run)
    })
}

/// The greatest common divisor.
pub fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
