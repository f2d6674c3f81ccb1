//! Properties of the arithmetic on its own: intervals, shares, canonical loops, fragments.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_core::interval::Interval;
use kvferry_core::moves::expand::{Fragment, coalesce};
use kvferry_core::moves::schedule::{CopyLoop, fold};
use kvferry_core::moves::strided::{Dim, Strided, each_step};
use kvferry_core::specs::shard::{Split, shares};
use proptest::prelude::*;

fn interval() -> impl Strategy<Value = Interval> {
    (0_u64..12, 0_u64..12).prop_map(|(begin, end)| Interval::new(begin, end))
}

fn members(interval: Interval) -> BTreeSet<u64> {
    (interval.begin..interval.end).collect()
}

/// The usual split, or ranges of the user's own that cover all heads.
fn split(heads: u64) -> impl Strategy<Value = Split> {
    let usual = (1_usize..10).prop_map(move |ranks| Split::even(heads, ranks));
    let range =
        (0..heads, 1..=heads).prop_map(move |(begin, len)| Interval::new(begin, (begin + len).min(heads)));
    let own = prop::collection::vec(range, 0..5).prop_map(move |mut ranges| {
        ranges.push(Interval::new(0, heads.div_ceil(2)));
        ranges.push(Interval::new(heads / 2, heads));
        ranges.retain(|range| !range.is_empty());
        let ranks = ranges.len();
        Split::given("head_ranges", ranges, heads, ranks).expect("it covers all heads")
    });
    prop_oneof![usual, own]
}

/// Dimensions of a tensor on either side: each steps over everything inside it, with padding.
fn dims() -> impl Strategy<Value = (u64, Vec<Dim>)> {
    let axis = (1_u64..4, 0_u64..3, 0_u64..3);
    (1_u64..4, prop::collection::vec(axis, 0..=4), any::<bool>()).prop_map(|(run, axes, swap)| {
        let (mut source_step, mut target_step) = (run, run);
        let mut dims = Vec::new();
        for (count, source_pad, target_pad) in axes {
            dims.push(Dim {
                count,
                source_stride: source_step + source_pad,
                target_stride: target_step + target_pad,
            });
            source_step = (source_step + source_pad) * count;
            target_step = (target_step + target_pad) * count;
        }
        if swap && dims.len() >= 2 {
            // Another memory order in the source: what the target steps through inside, it has outside.
            let (inner, outer) = (dims[0], dims[1]);
            dims[0].source_stride = run.max(1) * outer.count;
            dims[1].source_stride = run;
            dims[0].count = inner.count;
        }
        dims.reverse();
        (run, dims)
    })
}

/// The source byte of every target byte that a loop writes.
fn bytes_moved(run_bytes: u64, dims: &[Dim], source: u64, target: u64) -> BTreeMap<u64, u64> {
    let mut moved = BTreeMap::new();
    each_step(dims, source, target, &mut |source, target| {
        for byte in 0..run_bytes {
            moved.insert(target + byte, source + byte);
        }
    });
    moved
}

fn fragment_bytes(fragments: &[Fragment]) -> BTreeMap<(usize, u64), (usize, u64)> {
    let bytes = fragments.iter().flat_map(|fragment| {
        (0..fragment.length).map(|byte| {
            let target = (fragment.target_tensor, fragment.target_offset + byte);
            (target, (fragment.source_tensor, fragment.source_offset + byte))
        })
    });
    bytes.collect()
}

/// Fragments whose targets do not overlap, close enough together that many touch.
fn fragments() -> impl Strategy<Value = Vec<Fragment>> {
    let piece = (0_usize..2, 0_usize..2, 1_u64..4, 0_u64..2, prop_oneof![3 => Just(0_u64), 1 => 1..5_u64]);
    prop::collection::vec(piece, 0..20).prop_map(|pieces| {
        let (mut source_offset, mut target_offset) = (0, 0);
        let mut fragments = Vec::new();
        for (source_tensor, target_tensor, length, target_gap, source_gap) in pieces {
            source_offset += source_gap;
            target_offset += target_gap;
            fragments.push(Fragment { target_tensor, target_offset, source_tensor, source_offset, length });
            source_offset += length;
            target_offset += length;
        }
        fragments.sort();
        fragments
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn intersection_holds_what_both_hold(a in interval(), b in interval()) {
        let both: BTreeSet<u64> = members(a).intersection(&members(b)).copied().collect();
        prop_assert_eq!(members(a.intersect(b)), both.clone());
        prop_assert_eq!(a.overlaps(b), !both.is_empty());
        prop_assert_eq!(a.contains(b), members(b).is_subset(&members(a)));
        prop_assert_eq!(a.len(), members(a).len() as u64);
    }

    #[test]
    fn usual_split_follows_the_head_rule(heads in 1_u64..20, tp_size in 1_usize..70) {
        let split = Split::even(heads, tp_size);
        let tp = tp_size as u64;
        for rank in 0..tp {
            let units = split.units(usize::try_from(rank).unwrap());
            if tp <= heads {
                prop_assert_eq!(units, Interval::new(rank * heads / tp, (rank + 1) * heads / tp));
            } else {
                prop_assert_eq!(units, Interval::new(rank * heads / tp, rank * heads / tp + 1));
            }
        }
    }

    #[test]
    fn shares_tile_every_target_and_follow_the_reader_rule(
        (heads, source, target) in (1_u64..9).prop_flat_map(|heads| (Just(heads), split(heads), split(heads))),
    ) {
        let holders = |ranks: &[Interval], head: u64| -> Vec<usize> {
            (0..ranks.len()).filter(|rank| members(ranks[*rank]).contains(&head)).collect()
        };
        let mut expected = BTreeSet::new();
        for head in 0..heads {
            let (from, to) = (holders(source.ranges(), head), holders(target.ranges(), head));
            for (j, reader) in to.iter().enumerate() {
                expected.insert((*reader, head, from[j * from.len() / to.len()]));
            }
        }
        let found = shares(&source, &target).unwrap();
        let listed: Vec<(usize, u64, usize)> = found
            .iter()
            .flat_map(|share| members(share.units).into_iter().map(|head| (share.target, head, share.source)))
            .collect();
        prop_assert_eq!(listed.iter().copied().collect::<BTreeSet<_>>(), expected);
        prop_assert_eq!(listed.len(), listed.iter().collect::<BTreeSet<_>>().len());
        for pair in found.windows(2) {
            let joins = (pair[0].target, pair[0].source, pair[0].units.end)
                == (pair[1].target, pair[1].source, pair[1].units.begin);
            prop_assert!(!joins, "{:?} should be one share", pair);
        }
    }

    #[test]
    fn canonical_form_moves_the_same_bytes((run_bytes, dims) in dims()) {
        let canonical = Strided::new(run_bytes, dims.clone()).unwrap();
        let expected = bytes_moved(run_bytes, &dims, 0, 0);
        prop_assert_eq!(&bytes_moved(canonical.run_bytes, &canonical.dims, 0, 0), &expected);
        prop_assert_eq!(canonical.num_bytes(), run_bytes * dims.iter().map(|dim| dim.count).product::<u64>());
        let (source, target) = canonical.span_bytes();
        prop_assert_eq!(target, expected.keys().max().unwrap() + 1);
        prop_assert_eq!(source, expected.values().max().unwrap() + 1);
    }

    #[test]
    fn canonical_form_is_canonical((run_bytes, dims) in dims()) {
        let canonical = Strided::new(run_bytes, dims.clone()).unwrap();
        prop_assert_eq!(Strided::new(canonical.run_bytes, canonical.dims), Some(canonical));
        let mut shuffled = dims;
        shuffled.reverse();
        prop_assert_eq!(Strided::new(run_bytes, shuffled), Some(canonical), "the order of dimensions is no matter");
        for pair in canonical.looping().windows(2) {
            prop_assert!(pair[0].target_stride >= pair[1].target_stride);
            let inner_spans = (pair[1].count * pair[1].source_stride, pair[1].count * pair[1].target_stride);
            prop_assert!((pair[0].source_stride, pair[0].target_stride) != inner_spans);
        }
    }

    #[test]
    fn folding_moves_the_same_bytes(
        (run_bytes, dims) in dims(),
        steps in prop::collection::vec((1_u64..3, 1_u64..3), 0..7),
        tensors in prop::collection::vec(0_usize..2, 8),
    ) {
        let strided = Strided::new(run_bytes, dims).unwrap();
        let (source_span, target_span) = strided.span_bytes();
        let (mut source_offset, mut target_offset) = (0, 0);
        let mut loops = Vec::new();
        for (index, (source_step, target_step)) in [(0, 0)].into_iter().chain(steps).enumerate() {
            source_offset += source_step * source_span;
            target_offset += target_step * target_span;
            let target_tensor = tensors[index];
            loops.push(CopyLoop { source_tensor: 0, target_tensor, source_offset, target_offset, strided, entries: 0..1 });
        }
        let moved = |loops: &[CopyLoop]| -> Vec<(usize, BTreeMap<u64, u64>)> {
            let mut by_tensor: BTreeMap<usize, BTreeMap<u64, u64>> = BTreeMap::new();
            for copy in loops {
                let bytes = bytes_moved(copy.strided.run_bytes, &copy.strided.dims, copy.source_offset, copy.target_offset);
                by_tensor.entry(copy.target_tensor).or_default().extend(bytes);
            }
            by_tensor.into_iter().collect()
        };
        let folded = fold(loops.clone());
        prop_assert!(folded.len() <= loops.len());
        prop_assert_eq!(moved(&folded), moved(&loops));
        let bytes = |loops: &[CopyLoop]| loops.iter().map(|copy| copy.strided.num_bytes()).sum::<u64>();
        prop_assert_eq!(bytes(&folded), bytes(&loops));
        prop_assert_eq!(fold(folded.clone()), folded);
    }

    #[test]
    fn coalescing_is_complete_and_idempotent(fragments in fragments()) {
        let mut merged = fragments.clone();
        coalesce(&mut merged);
        prop_assert_eq!(fragment_bytes(&merged), fragment_bytes(&fragments));
        let mut again = merged.clone();
        coalesce(&mut again);
        prop_assert_eq!(&again, &merged);
        for pair in merged.windows(2) {
            let touch = pair[0].target_tensor == pair[1].target_tensor
                && pair[0].source_tensor == pair[1].source_tensor
                && pair[0].target_offset + pair[0].length == pair[1].target_offset
                && pair[0].source_offset + pair[0].length == pair[1].source_offset;
            prop_assert!(!touch, "{:?} should be one fragment", pair);
        }
    }
}
