//! Ranges: what was worked out for some entries of a table, kept for the next loop over the same ones.

use std::ops::Range;

/// How many are kept: the loops of a schedule repeat over few different ranges, one after another.
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
        if let Some((_, made)) = self.0.iter().rfind(|(known, _)| *known == range) {
            return made.clone();
        }
        if self.0.len() == LATEST {
            self.0.remove(0);
        }
        let made = work_out();
        self.0.push((range, made.clone()));
        made
    }
}
