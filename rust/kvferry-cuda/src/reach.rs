//! Reach: everything that is handed to a device lies inside its tensor, checked again before any of it is.

use kvferry_core::copies::repair::{Repair, Transposition};
use kvferry_core::memory::region::Region;
use kvferry_core::moves::overlap::BoundSchedule;

use crate::ranges::Ranges;

/// # Panics
///
/// If a loop reaches outside its tensors. Binding rules that out.
pub fn check_loops(bound: &BoundSchedule<'_>) {
    let BoundSchedule { schedule, source, target } = bound;
    let mut known = Ranges::default();
    for copy in &schedule.loops {
        let furthest = |entries: &[u64]| entries[copy.entries.clone()].iter().max().copied();
        let table = &schedule.table;
        let (source_entry, target_entry) =
            known.of(copy.entries.clone(), || (furthest(&table.source), furthest(&table.target)));
        let (source_span, target_span) = copy.strided.span_bytes();
        check(&source[copy.source_tensor], copy.source_offset, source_entry, source_span);
        check(&target[copy.target_tensor], copy.target_offset, target_entry, target_span);
    }
}

/// # Panics
///
/// If a row reaches outside its tensor. [`Repair::new`] rules that out.
pub fn check_rows(repair: &Repair) {
    let Transposition { outer, inner, item, element_bytes } = repair.transposition;
    let [planes, parts] = repair.matrices;
    let steps = [outer, inner, item[0], item[1], planes, parts];
    let reach = steps.iter().map(|step| (step.count - 1) * step.stride).sum::<u64>();
    check(&repair.region, 0, repair.rows.iter().max().copied(), reach + element_bytes);
}

fn check(region: &Region, offset: u64, furthest: Option<u64>, span_bytes: u64) {
    let end = furthest.map(|entry| offset.checked_add(entry).and_then(|at| at.checked_add(span_bytes)));
    let Region { name, extent_bytes, .. } = region;
    assert!(
        end.is_none_or(|end| end.is_some_and(|end| end <= *extent_bytes)),
        "a copy ends at {end:?}, past the {extent_bytes} bytes of {name}"
    );
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use kvferry_core::memory::tensor::Device;

    use super::*;

    #[test]
    fn a_copy_may_end_with_its_tensor_and_no_later() {
        let region = Region {
            name: "memory".to_owned(),
            address: 0,
            extent_bytes: 30,
            block_stride: 10,
            device: Device::CPU,
            writable: true,
        };
        let is_inside = |offset| catch_unwind(|| check(&region, offset, Some(7), 18)).is_ok();
        assert!(is_inside(5)); // 5 + 7 + 18 = 30
        assert!(!is_inside(6));
        assert!(!is_inside(u64::MAX));
        check(&region, 31, None, 1);
    }
}
