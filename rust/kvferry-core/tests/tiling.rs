//! Properties of whole plans over dense tensors: they tile what is due, exactly and inside the tensors.

mod common;

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::sync::Arc;

use kvferry_core::moves::bind::bind;
use kvferry_core::moves::columns::{Columns, Expansion};
use kvferry_core::moves::expand::{Fragment, fragments};
use kvferry_core::moves::overlap::{BoundSchedule, check};
use kvferry_core::moves::schedule::Schedule;
use kvferry_core::moves::strided::each_step;
use kvferry_core::planning::blocks::{BlockList, due, stretches};
use kvferry_core::planning::plan::Plan;
use kvferry_core::planning::route::Route;
use kvferry_core::side::Side;
use proptest::prelude::*;

use crate::common::{blocks, case, dense, engine};

/// The fragments as `Expansion` writes them into columns.
fn written_columns(schedule: &Schedule) -> Vec<Fragment> {
    let expansion = Expansion::new(schedule).unwrap();
    let mut columns = [(); 5].map(|()| vec![MaybeUninit::new(-1_i64); expansion.len()]);
    let [source_tensor, source_offset, target_tensor, target_offset, length] = &mut columns;
    expansion.write(&mut Columns { source_tensor, source_offset, target_tensor, target_offset, length });
    let [source_tensor, source_offset, target_tensor, target_offset, length] = columns.map(|column| {
        // SAFETY: every element was initialised when the column was made.
        column.into_iter().map(|cell| unsafe { cell.assume_init() }.unsigned_abs()).collect::<Vec<u64>>()
    });
    assert_eq!(expansion.min_bytes(), length.iter().copied().min().unwrap_or(0));
    assert_eq!(expansion.max_bytes(), length.iter().copied().max().unwrap_or(0));
    let fragment = |index: usize| Fragment {
        target_tensor: usize::try_from(target_tensor[index]).unwrap(),
        target_offset: target_offset[index],
        source_tensor: usize::try_from(source_tensor[index]).unwrap(),
        source_offset: source_offset[index],
        length: length[index],
    };
    (0..expansion.len()).map(fragment).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn stretches_tile_the_due_slots_in_order(case in case()) {
        let (source, target) = (engine("s", &case.source, &case), engine("t", &case.target, &case));
        let (source_blocks, target_blocks) =
            (blocks(&case.source, Side::Source, &case), blocks(&case.target, Side::Target, &case));
        let (source_first, target_first) = (source_blocks.first_tokens[0], target_blocks.first_tokens[0]);
        let source_list = BlockList::new(&source, 0, &source_blocks.ids[0], source_first).unwrap();
        let target_list = BlockList::new(&target, 0, &target_blocks.ids[0], target_first).unwrap();
        let due = due(&target_list, case.tokens).unwrap();
        let mut position = due.begin;
        for stretch in stretches(&source_list, &target_list, due).unwrap() {
            for (blocks, first, size, block, offset) in [
                (&source_blocks, source_first, case.source.tokens_per_block, stretch.source_block, stretch.source_offset),
                (&target_blocks, target_first, case.target.tokens_per_block, stretch.target_block, stretch.target_offset),
            ] {
                let index = usize::try_from((position - first) / size).unwrap();
                prop_assert_eq!(blocks.ids[0][index].unsigned_abs(), block);
                prop_assert_eq!((position - first) % size, offset);
                prop_assert!(offset + stretch.slots <= size);
            }
            prop_assert!(stretch.slots > 0);
            position += stretch.slots;
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
            let plan = Plan::new(Arc::clone(&route), (Side::Target, target_rank), &source_blocks, &target_blocks, case.tokens).unwrap();
            let target = dense(&plan, Side::Target, target_rank);
            let mut written = BTreeMap::new();
            for (source_rank, _) in plan.rank_pairs() {
                let source = dense(&plan, Side::Source, source_rank);
                let schedule = bind(&plan, &source, &target).unwrap();
                check(&[BoundSchedule::new(&schedule, &source, &target)], false).unwrap();
                let mut from_fragments = BTreeMap::new();
                let fragments = fragments(&schedule).unwrap();
                prop_assert!(fragments.is_sorted());
                prop_assert_eq!(&written_columns(&schedule), &fragments);
                for fragment in &fragments {
                    prop_assert!(fragment.source_offset + fragment.length <= source.regions[fragment.source_tensor].extent_bytes);
                    prop_assert!(fragment.target_offset + fragment.length <= target.regions[fragment.target_tensor].extent_bytes);
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
