//! Sharding: which units (KV heads) each rank holds, and who reads which unit from whom.

use crate::error::{Result, counted, fail};
use crate::interval::Interval;

/// Bound on the shares of a route: honest splits need about as many as there are ranks, nested ranges
/// would need the square of that.
pub const MAX_SHARES: usize = 1 << 20;

/// The units that each rank of a stage holds, in rank order. Ranks may hold the same units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split(Vec<Interval>);

/// Units that one rank reads from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share {
    /// The reader, an index into the target's split.
    pub target: usize,
    /// The rank that it reads from, an index into the source's split.
    pub source: usize,
    /// What it reads.
    pub units: Interval,
}

impl Split {
    /// The usual split of `units` over `ranks`: contiguous and even to within one, and one replicated
    /// unit a rank where there are more ranks than units.
    pub fn even(units: u64, ranks: usize) -> Self {
        Self((0..ranks).map(|rank| Self::even_units(units, ranks, rank)).collect())
    }

    /// What one rank holds of the usual split.
    pub fn even_units(units: u64, ranks: usize, rank: usize) -> Interval {
        let first = |rank: usize| rank as u64 * units / ranks as u64;
        let is_replicated = Self::is_replicated(units, ranks);
        let end = if is_replicated { first(rank) + 1 } else { first(rank + 1) };
        Interval::new(first(rank), end)
    }

    /// Whether ranks of the usual split hold the same units.
    pub fn is_replicated(units: u64, ranks: usize) -> bool {
        ranks as u64 > units
    }

    /// A split of the user's own, which must cover all `units`; ranges may be uneven and overlap.
    pub fn given(field: &str, ranges: Vec<Interval>, units: u64, ranks: usize) -> Result<Self> {
        if ranges.len() != ranks {
            let (held, ranks) = (counted(ranges.len(), "range"), counted(ranks, "TP rank"));
            fail!(Value, "{field} has {held} for {ranks}");
        }
        let all = Interval::new(0, units);
        if let Some(wrong) = ranges.iter().find(|range| range.is_empty() || !all.contains(**range)) {
            fail!(Value, "{field} range {wrong} is empty or outside the heads {all}");
        }
        let mut sorted = ranges.clone();
        sorted.sort_unstable();
        let covered = sorted
            .iter()
            .fold(0, |covered, range| if range.begin <= covered { covered.max(range.end) } else { covered });
        if covered < units {
            fail!(Value, "{field} leaves head {covered} of {units} to no TP rank");
        }
        Ok(Self(ranges))
    }

    /// The units that a rank holds.
    pub fn units(&self, rank: usize) -> Interval {
        self.0[rank]
    }

    /// The same units on `times` ranks in a row each: every CP rank holds a state whole.
    #[must_use]
    pub fn repeated(&self, times: usize) -> Self {
        Self(self.0.iter().flat_map(|units| std::iter::repeat_n(*units, times)).collect())
    }

    /// The units of all ranks.
    pub fn ranges(&self) -> &[Interval] {
        &self.0
    }

    fn holders(&self, unit: u64) -> Vec<usize> {
        let holds = |rank: &usize| self.0[*rank].contains(Interval::new(unit, unit + 1));
        (0..self.0.len()).filter(holds).collect()
    }
}

/// Who reads what from whom, ordered by reader, source and unit.
///
/// Of the `n` targets that need a unit, the `j`-th reads it from the `j * R / n`-th of its `R` holders.
/// Between two range boundaries of either split that choice is the same for every unit, so it is made
/// once for each such cell.
pub fn shares(source: &Split, target: &Split) -> Result<Vec<Share>> {
    let mut bounds: Vec<u64> =
        source.0.iter().chain(&target.0).flat_map(|range| [range.begin, range.end]).collect();
    bounds.sort_unstable();
    bounds.dedup();
    let mut shares = Vec::new();
    for cell in bounds.windows(2).map(|pair| Interval::new(pair[0], pair[1])) {
        let (holders, readers) = (source.holders(cell.begin), target.holders(cell.begin));
        for (j, &reader) in readers.iter().enumerate() {
            let source = holders[j * holders.len() / readers.len()];
            shares.push(Share { target: reader, source, units: cell });
        }
        if shares.len() > MAX_SHARES {
            fail!(Value, "the two head splits overlap in more than {MAX_SHARES} places");
        }
    }
    shares.sort_unstable();
    Ok(join_adjacent(shares))
}

fn join_adjacent(shares: Vec<Share>) -> Vec<Share> {
    let mut joined: Vec<Share> = Vec::with_capacity(shares.len());
    for share in shares {
        match joined.last_mut() {
            Some(last)
                if (last.target, last.source, last.units.end)
                    == (share.target, share.source, share.units.begin) =>
            {
                last.units.end = share.units.end;
            }
            _ => joined.push(share),
        }
    }
    joined
}
