//! Block ids as plain numbers.

/// An id that occurs twice. Ids are mostly dense, so that marking them is cheaper than sorting.
pub(crate) fn repeated(ids: &[u64]) -> Option<u64> {
    let highest = ids.iter().copied().max()?;
    let words = usize::try_from(highest / 64).ok().filter(|words| *words <= ids.len());
    let Some(words) = words else {
        let mut sorted = ids.to_vec();
        sorted.sort_unstable();
        return sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
    };
    let mut marks = vec![0_u64; words + 1];
    ids.iter().copied().find(|id| {
        let word = usize::try_from(id / 64).unwrap_or(words); // at most `words`, as the highest is
        let bit = 1 << (id % 64);
        let is_marked = marks[word] & bit != 0;
        marks[word] |= bit;
        is_marked
    })
}

/// An id that is in both lists.
pub(crate) fn first_common(ids: &[u64], others: &[u64]) -> Option<u64> {
    let mut sorted = others.to_vec();
    sorted.sort_unstable();
    ids.iter().copied().find(|id| sorted.binary_search(id).is_ok())
}
