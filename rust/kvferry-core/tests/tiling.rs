//! Properties of whole plans over dense tensors: they tile what is due, exactly and inside the tensors.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry_core::bind::bind;
use kvferry_core::blocks::{BlockList, due, pieces};
use kvferry_core::expand::{each_step, fragments};
use kvferry_core::overlap::{Bound, check};
use kvferry_core::plan::Plan;
use kvferry_core::route::{Route, Side};
use proptest::prelude::*;

use crate::common::{blocks, case, dense, engine};

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pieces_tile_the_due_slots_in_order(case in case()) {
        let (source, target) = (engine("s", &case.source, &case), engine("t", &case.target, &case));
        let (source_blocks, target_blocks) =
            (blocks(&case.source, Side::Source, &case), blocks(&case.target, Side::Target, &case));
        let source_list = BlockList::new(&source, 0, &source_blocks.ids[0], source_blocks.first_tokens[0]).unwrap();
        let target_list = BlockList::new(&target, 0, &target_blocks.ids[0], target_blocks.first_tokens[0]).unwrap();
        let due = due(&target_list, case.tokens).unwrap();
        let mut position = due.begin;
        for piece in pieces(&source_list, &target_list, due).unwrap() {
            for (list, size, block, slot) in [
                (&source_list, case.source.tokens_per_block, piece.source_block, piece.source_slot),
                (&target_list, case.target.tokens_per_block, piece.target_block, piece.target_slot),
            ] {
                let index = usize::try_from((position - list.first) / size).unwrap();
                prop_assert_eq!(list.ids[index].unsigned_abs(), block);
                prop_assert_eq!((position - list.first) % size, slot);
                prop_assert!(slot + piece.slots <= size);
            }
            prop_assert!(piece.slots > 0);
            position += piece.slots;
        }
        prop_assert_eq!(position.max(due.begin), due.end.max(due.begin));
    }

    #[test]
    fn fragments_tile_the_payload_inside_the_tensors(case in case()) {
        let route = Route::new(engine("s", &case.source, &case), engine("t", &case.target, &case), false).unwrap();
        let route = Arc::new(route);
        let (source_blocks, target_blocks) =
            (blocks(&case.source, Side::Source, &case), blocks(&case.target, Side::Target, &case));
        for target_rank in 0..route.target().num_ranks() {
            let plan = Plan::new(Arc::clone(&route), target_rank, &source_blocks, &target_blocks, case.tokens).unwrap();
            let target = dense(&plan, Side::Target, target_rank);
            let mut written = BTreeMap::new();
            for (source_rank, _) in plan.rank_pairs() {
                let source = dense(&plan, Side::Source, source_rank);
                let schedule = bind(&plan, &source, &target).unwrap();
                check(&[Bound { schedule: &schedule, source: &source, target: &target }], false).unwrap();
                let mut from_fragments = BTreeMap::new();
                let fragments = fragments(&schedule).unwrap();
                prop_assert!(fragments.is_sorted());
                for fragment in &fragments {
                    prop_assert!(fragment.source_offset + fragment.length <= source.extent_bytes(fragment.source_tensor));
                    prop_assert!(fragment.target_offset + fragment.length <= target.extent_bytes(fragment.target_tensor));
                    for byte in 0..fragment.length {
                        let at = (fragment.target_tensor, fragment.target_offset + byte);
                        let from = (fragment.source_tensor, fragment.source_offset + byte);
                        prop_assert!(from_fragments.insert(at, from).is_none(), "{:?} is written twice", at);
                        prop_assert!(written.insert(at, source_rank).is_none(), "{:?} is written twice", at);
                    }
                }
                let mut from_loops = BTreeMap::new();
                for copy in &schedule.loops {
                    for entry in copy.entries.clone() {
                        let source = copy.source_offset + schedule.table.source[entry];
                        let target = copy.target_offset + schedule.table.target[entry];
                        each_step(&copy.strided.dims, source, target, &mut |source, target| {
                            for byte in 0..copy.strided.run_bytes {
                                let at = (copy.target_tensor, target + byte);
                                from_loops.insert(at, (copy.source_tensor, source + byte));
                            }
                        });
                    }
                }
                prop_assert_eq!(from_loops, from_fragments);
            }
            prop_assert_eq!(written.len() as u64, plan.num_bytes());
        }
    }
}
