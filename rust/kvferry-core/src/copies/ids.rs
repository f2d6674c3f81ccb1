//! Block ids of a call: that they exist, and that no target is named twice.

use crate::error::{Result, fail};
use crate::ids::repeated;

/// The ids as block indices; `what` names their list, `limit` is how many blocks there are and where.
pub fn existing(what: &str, ids: &[i64], (blocks, tensor): (u64, &str)) -> Result<Vec<u64>> {
    let index = |id: &i64| u64::try_from(*id).ok().filter(|index| *index < blocks);
    if let Some(id) = ids.iter().find(|id| index(id).is_none()) {
        fail!(BlockRange, "block id {id} in {what} is outside [0, {blocks}) of {tensor}");
    }
    Ok(ids.iter().filter_map(index).collect())
}

/// Refuses ids of which one occurs twice.
pub fn check_distinct(what: &str, ids: &[u64]) -> Result<()> {
    match repeated(ids) {
        Some(id) => fail!(Overlap, "block id {id} occurs twice in {what}"),
        None => Ok(()),
    }
}
