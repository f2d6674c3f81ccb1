//! Ranges: what was worked out for some entries of a table, kept for the next loop over the same ones.

use std::ops::Range;

/// How many are looked through: the loops of a schedule repeat over few different ranges, one after another.
const LATEST: usize = 8;

/// Results by range.
#[derive(Clone, Debug)]
pub struct Ranges<T>(Vec<(Range<usize>, T)>);

impl<T> Default for Ranges<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Clone> Ranges<T> {
    /// What `work_out` gives for a range, or has given lately.
    pub fn of(&mut self, range: Range<usize>, work_out: impl FnOnce() -> T) -> T {
        let latest = self.0.iter().rev().take(LATEST);
        if let Some((_, made)) = latest.into_iter().find(|(known, _)| *known == range) {
            return made.clone();
        }
        let made = work_out();
        self.0.push((range, made.clone()));
        made
    }
}
