//! A block copy: a schedule, the memory that it moves between, and the proof that it may run.

use crate::copies::view::View;
use crate::error::{Result, fail};
use crate::ids::first_common;
use crate::memory::region::Region;
use crate::moves::overlap::{self, BoundSchedule};
use crate::moves::schedule::Schedule;

/// A copy in one process that writes no byte twice, and none that it reads.
#[derive(Clone, Debug)]
pub struct BlockCopy {
    schedule: Schedule,
    source: Vec<Region>,
    target: Vec<Region>,
}

/// Tensors, which of their dimensions counts the blocks, and the blocks.
pub(crate) struct Blocks<'a> {
    pub views: &'a [View],
    pub dimension: usize,
    pub ids: &'a [u64],
}

impl BlockCopy {
    /// Takes a schedule, unless it reads what it writes, or writes one byte through two tensors.
    ///
    /// Most copies share no memory, or move blocks inside tensors that are the same on both sides, which
    /// is sound as long as no block is both read and written. Only for others are bytes compared.
    pub(crate) fn new(schedule: Schedule, source: &Blocks<'_>, target: &Blocks<'_>) -> Result<Self> {
        let regions =
            |blocks: &Blocks<'_>| blocks.views.iter().map(|view| view.region(blocks.dimension)).collect();
        let copy = Self { schedule, source: regions(source), target: regions(target) };
        match sharing(source.views, target.views) {
            Sharing::None => {}
            Sharing::SameTensors => {
                if let Some(id) = first_common(source.ids, target.ids) {
                    fail!(Overlap, "block id {id} of one tensor is both read and written");
                }
            }
            Sharing::Other => overlap::check(&[copy.bound()], true)?,
        }
        Ok(copy)
    }

    /// What is moved, and between which memory.
    pub fn bound(&self) -> BoundSchedule<'_> {
        BoundSchedule { schedule: &self.schedule, source: &self.source, target: &self.target }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sharing {
    None,
    /// Each tensor that shares memory is the same at the same place of both lists, and shares it with no
    /// other.
    SameTensors,
    Other,
}

fn sharing(sources: &[View], targets: &[View]) -> Sharing {
    let mut found = Sharing::None;
    let mut regions: Vec<(u64, u64, bool, usize)> = Vec::with_capacity(sources.len() + targets.len());
    for (is_target, views) in [(false, sources), (true, targets)] {
        let region = |(index, view): (usize, &View)| {
            (view.address, view.address + view.extent_bytes, is_target, index)
        };
        regions.extend(views.iter().enumerate().filter(|(_, view)| view.extent_bytes > 0).map(region));
    }
    regions.sort_unstable();
    let mut rest = regions.as_slice();
    while let [first, after @ ..] = rest {
        let mut end = first.1;
        let shared = after.iter().take_while(|next| {
            let is_shared = next.0 < end;
            end = end.max(next.1);
            is_shared
        });
        let cluster = &rest[..=shared.count()];
        rest = &rest[cluster.len()..];
        let is_same = matches!(cluster, [one, other] if one.2 != other.2 && one.3 == other.3
            && sources[one.3].is_same(&targets[one.3]));
        match cluster {
            [_] => {}
            _ if cluster.iter().all(|region| !region.2) => {}
            _ if is_same => found = Sharing::SameTensors,
            _ => return Sharing::Other,
        }
    }
    found
}
