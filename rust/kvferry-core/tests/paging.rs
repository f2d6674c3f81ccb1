//! Paging and pieces against the interleaving formula, slot by slot.

use std::collections::BTreeMap;

use kvferry_core::interval::Interval;
use kvferry_core::planning::blocks::Stretch;
use kvferry_core::planning::pieces::pieces;
use kvferry_core::specs::paging::Paging;
use proptest::prelude::*;

fn paging() -> impl Strategy<Value = Paging> {
    (1_u64..4, 1_u64..4, 1_u64..4, 1_u64..4).prop_map(|(cp_size, interleave, turns, physical_blocks)| {
        // Every rank's slots are a multiple of the physical blocks.
        let slots_per_block = cp_size * interleave * turns * physical_blocks;
        let interleave = if cp_size == 1 { slots_per_block } else { interleave };
        Paging { slots_per_block, cp_size, interleave, physical_blocks }
    })
}

/// The CP rank, tensor block and slot of a block's slot `t`.
fn place(paging: &Paging, t: u64) -> (u64, u64, u64) {
    let rank = (t / paging.interleave) % paging.cp_size;
    let local = (t / (paging.interleave * paging.cp_size)) * paging.interleave + t % paging.interleave;
    (rank, local / paging.slots_per_physical(), local % paging.slots_per_physical())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2048, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn runs_hold_each_slot_of_their_rank_where_the_formula_says(
        paging in paging(),
        begin in 0_u64..40,
        len in 0_u64..40,
    ) {
        let within = Interval::new(begin, begin + len)
            .intersect(Interval::new(0, paging.slots_per_block));
        let mut found = BTreeMap::new();
        for rank in 0..paging.cp_size {
            for run in paging.runs(rank, within) {
                prop_assert!(run.slots > 0);
                for slot in 0..run.slots {
                    let twice = found.insert(run.begin + slot, (rank, run.physical, run.slot + slot));
                    prop_assert!(twice.is_none());
                }
            }
        }
        let expected: BTreeMap<_, _> =
            (within.begin..within.end.max(within.begin)).map(|t| (t, place(&paging, t))).collect();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn ranks_meet_where_a_position_lies_on_both(source in paging(), target in paging()) {
        for source_rank in 0..source.cp_size {
            for target_rank in 0..target.cp_size {
                let period = source.period() * target.period();
                let on_both = (0..period).any(|t| {
                    (t / source.interleave) % source.cp_size == source_rank
                        && (t / target.interleave) % target.cp_size == target_rank
                });
                prop_assert_eq!(source.meets(source_rank, &target, target_rank), on_both);
            }
        }
    }

    #[test]
    fn pieces_tile_a_stretch_over_all_rank_pairs(
        source in paging(),
        target in paging(),
        offsets in (0_u64..30, 0_u64..30),
        slots in 1_u64..60,
    ) {
        let source_offset = offsets.0 % source.slots_per_block;
        let target_offset = offsets.1 % target.slots_per_block;
        let slots = slots.min(source.slots_per_block - source_offset).min(target.slots_per_block - target_offset);
        let stretch = Stretch { position: 0, source_block: 5, source_offset, target_block: 7, target_offset, slots };
        let mut found = BTreeMap::new();
        for source_rank in 0..source.cp_size {
            for target_rank in 0..target.cp_size {
                for piece in pieces(&[stretch], (&source, source_rank), (&target, target_rank)) {
                    prop_assert_eq!((piece.source.block, piece.target.block), (5, 7));
                    let shape = piece.shape;
                    for repeat in 0..shape.repeats {
                        for slot in 0..shape.slots {
                            let from = (source_rank, piece.source.physical, piece.source.slot + repeat * shape.source_step + slot);
                            let to = (target_rank, piece.target.physical, piece.target.slot + repeat * shape.target_step + slot);
                            prop_assert!(found.insert(to, from).is_none());
                        }
                    }
                }
            }
        }
        let expected: BTreeMap<_, _> = (0..slots)
            .map(|t| (place(&target, target_offset + t), place(&source, source_offset + t)))
            .collect();
        prop_assert_eq!(found, expected);
    }
}
