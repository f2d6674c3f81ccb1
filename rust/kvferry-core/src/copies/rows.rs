//! Rows: what lies at one index of two tensors' first dimension, whatever it means.

use std::collections::HashSet;

use crate::copies::block_copy::{BlockCopy, Blocks};
use crate::copies::ids;
use crate::copies::parts::{Part, schedule};
use crate::copies::view::View;
use crate::error::{Result, fail};
use crate::moves::strided::Dim;

/// Binds a copy of rows between tensors `i` of both lists: row `target_ids[j]` becomes what row
/// `source_ids[j]` is. A pair of tensors that is listed again, as engines do whose layers share one, is
/// copied once.
pub fn bind(sources: &[View], targets: &[View], source_ids: &[i64], target_ids: &[i64]) -> Result<BlockCopy> {
    let mut parts = Vec::with_capacity(sources.len());
    let mut seen = HashSet::new();
    for (index, (source, target)) in sources.iter().zip(targets).enumerate() {
        target.check_target()?;
        let (Some((_, from_shape)), Some((_, to_shape))) =
            (source.sizes.split_first(), target.sizes.split_first())
        else {
            fail!(Layout, "{} or {} has no dimension whose rows could be copied", source.name, target.name);
        };
        if (from_shape, source.item_bytes) != (to_shape, target.item_bytes) {
            fail!(
                Layout,
                "{} has rows of shape {from_shape:?} of {}-byte items, {} of shape {to_shape:?} of {}-byte items",
                source.name,
                source.item_bytes,
                target.name,
                target.item_bytes
            );
        }
        let strides = (&source.strides, &target.strides);
        if !seen.insert((source.address, strides.0, target.address, strides.1, from_shape, source.item_bytes))
        {
            continue;
        }
        let dim = |axis: usize| Dim {
            count: source.sizes[axis],
            source_stride: source.strides[axis],
            target_stride: target.strides[axis],
        };
        parts.push(Part {
            source_tensor: index,
            target_tensor: index,
            source_offset: 0,
            target_offset: 0,
            block_strides: (source.strides[0], target.strides[0]),
            dims: (1..source.sizes.len()).map(dim).collect(),
            item_bytes: source.item_bytes,
        });
    }
    let source_ids = ids::existing("src_block_ids", source_ids, fewest_rows(sources))?;
    let target_ids = ids::existing("dst_block_ids", target_ids, fewest_rows(targets))?;
    ids::check_distinct("dst_block_ids", &target_ids)?;
    let schedule = schedule(&parts, &source_ids, &target_ids)?;
    let source = Blocks { views: sources, dimension: 0, ids: &source_ids };
    let target = Blocks { views: targets, dimension: 0, ids: &target_ids };
    BlockCopy::new(schedule, &source, &target)
}

/// The tensor that has the fewest rows, and how many.
fn fewest_rows(views: &[View]) -> (u64, &str) {
    let rows = views.iter().map(|view| (view.sizes[0], view.name.as_str()));
    rows.min().unwrap_or((u64::MAX, ""))
}
