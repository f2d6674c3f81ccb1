//! Reach: everything that is handed to a device lies inside its tensor, checked again before any of it is.

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
        source[copy.source_tensor].assert_reach(copy.source_offset, source_entry, source_span);
        target[copy.target_tensor].assert_reach(copy.target_offset, target_entry, target_span);
    }
}
