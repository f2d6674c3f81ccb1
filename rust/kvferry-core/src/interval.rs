//! Half-open intervals: the only set arithmetic that sharding needs.

use std::fmt;

/// The integers `begin <= i < end`; empty where `begin >= end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Interval {
    /// First member.
    pub begin: u64,
    /// One past the last member.
    pub end: u64,
}

impl Interval {
    /// The interval `[begin, end)`.
    pub const fn new(begin: u64, end: u64) -> Self {
        Self { begin, end }
    }

    /// Members in the interval.
    pub const fn len(self) -> u64 {
        self.end.saturating_sub(self.begin)
    }

    /// Whether there is no member.
    pub const fn is_empty(self) -> bool {
        self.begin >= self.end
    }

    /// The members of both.
    #[must_use]
    pub fn intersect(self, other: Self) -> Self {
        Self::new(self.begin.max(other.begin), self.end.min(other.end))
    }

    /// Whether both have a member in common.
    pub fn overlaps(self, other: Self) -> bool {
        !self.intersect(other).is_empty()
    }

    /// Whether every member of `other` is a member of `self`.
    pub fn contains(self, other: Self) -> bool {
        other.is_empty() || self.begin <= other.begin && other.end <= self.end
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, {})", self.begin, self.end)
    }
}
