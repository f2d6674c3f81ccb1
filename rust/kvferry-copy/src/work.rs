//! Work: copy loops with absolute addresses, and how it is shared out between threads.

use kvferry_core::moves::strided::Strided;

/// One strided copy, repeated at every pair of entries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work<'a> {
    /// What is copied at each entry.
    pub strided: Strided,
    /// Address to which source entries are added.
    pub source: u64,
    /// Address to which target entries are added.
    pub target: u64,
    /// Byte offsets, as many as target entries.
    pub source_entries: &'a [u64],
    /// Byte offsets.
    pub target_entries: &'a [u64],
}

impl Work<'_> {
    /// Bytes moved.
    pub fn num_bytes(&self) -> u64 {
        self.strided.num_bytes() * self.target_entries.len() as u64
    }
}

/// Cuts work at table entries into `parts` of about equal bytes.
pub(crate) fn cut<'a>(work: &[Work<'a>], total_bytes: u64, parts: usize) -> Vec<Vec<Work<'a>>> {
    let quota = total_bytes.div_ceil(parts as u64).max(1);
    let mut cut = vec![Vec::new()];
    let mut room = quota;
    for whole in work {
        let mut rest = *whole;
        while !rest.target_entries.is_empty() {
            if room == 0 && cut.len() < parts {
                cut.push(Vec::new());
                room = quota;
            }
            let entry_bytes = rest.strided.num_bytes().max(1);
            let fitting = usize::try_from(room.div_ceil(entry_bytes)).unwrap_or(usize::MAX);
            let is_last = cut.len() == parts;
            let taken = if is_last { usize::MAX } else { fitting }.min(rest.target_entries.len());
            let (now, later) = split(rest, taken);
            room = room.saturating_sub(now.num_bytes());
            if let Some(part) = cut.last_mut() {
                part.push(now);
            }
            rest = later;
        }
    }
    cut
}

fn split(work: Work<'_>, at: usize) -> (Work<'_>, Work<'_>) {
    let (source_now, source_later) = work.source_entries.split_at(at);
    let (target_now, target_later) = work.target_entries.split_at(at);
    (
        Work { source_entries: source_now, target_entries: target_now, ..work },
        Work { source_entries: source_later, target_entries: target_later, ..work },
    )
}

#[cfg(test)]
mod tests {
    use kvferry_core::moves::strided::Dim;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_hold_every_entry_once_in_order(
            lengths in prop::collection::vec((0_usize..40, 1_u64..9), 0..6),
            parts in 1_usize..9,
        ) {
            let entries: Vec<Vec<u64>> = lengths.iter().map(|(length, _)| (0..*length as u64).collect()).collect();
            let work: Vec<Work<'_>> = lengths.iter().zip(&entries).enumerate().map(|(index, ((_, run), entries))| Work {
                strided: Strided::new(*run, std::iter::empty::<Dim>()).unwrap(),
                source: index as u64,
                target: index as u64,
                source_entries: entries,
                target_entries: entries,
            }).collect();
            let total: u64 = work.iter().map(Work::num_bytes).sum();
            let listed = |work: &[Work<'_>]| -> Vec<(u64, u64)> {
                work.iter().flat_map(|work| work.target_entries.iter().map(|entry| (work.target, *entry))).collect()
            };
            let cut = cut(&work, total, parts);
            prop_assert!(cut.len() <= parts);
            prop_assert_eq!(listed(&cut.concat()), listed(&work));
            let largest = work.iter().map(|work| work.strided.num_bytes()).max().unwrap_or(0);
            for part in &cut {
                let bytes: u64 = part.iter().map(Work::num_bytes).sum();
                prop_assert!(bytes <= total.div_ceil(parts as u64) + largest);
            }
        }
    }
}
