//! The two ends of a transfer.

use std::fmt;

/// One end, or the other.
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

    /// The end that it is not.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Source => Self::Target,
            Self::Target => Self::Source,
        }
    }

    /// Of what both ends have, this end's.
    pub fn of<T>(self, source: T, target: T) -> T {
        match self {
            Self::Source => source,
            Self::Target => target,
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.of("source", "target"))
    }
}
