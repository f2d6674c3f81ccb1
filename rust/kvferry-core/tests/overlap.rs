//! The overlap check against plain sets of bytes, for tensors that share memory in every way.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvferry_core::Error;
use kvferry_core::memory::cache::RankCache;
use kvferry_core::moves::bind::bind;
use kvferry_core::moves::expand::fragments;
use kvferry_core::moves::overlap::{BoundSchedule, check};
use kvferry_core::moves::schedule::Schedule;
use kvferry_core::planning::plan::Plan;
use kvferry_core::planning::route::Route;
use kvferry_core::side::Side;
use proptest::prelude::*;

use crate::common::{Case, blocks, case, dense, engine};

/// Where tensors lie, and how far their rows are pulled apart, so that another's fit in between.
#[derive(Clone, Debug)]
struct Places {
    addresses: Vec<u64>,
    stretch: u64,
}

fn places() -> impl Strategy<Value = Places> {
    let near = prop::collection::vec(0_u64..40, 64);
    let apart = prop::collection::vec(0_u64..3000, 64);
    (prop_oneof![near, apart], 1_u64..4).prop_map(|(addresses, stretch)| Places { addresses, stretch })
}

impl Places {
    fn lay_out(&self, cache: RankCache, begin: usize) -> RankCache {
        let mut addresses = self.addresses.iter().cycle().skip(begin);
        cache.map(|tensor| {
            tensor.address = *addresses.next().unwrap();
            let rows = tensor.strides.len() - 1;
            tensor.strides[..rows].iter_mut().for_each(|stride| *stride *= self.stretch);
        })
    }
}

/// Whether some byte is written through two tensors, or read and written.
fn conflicts(bound: &[(Schedule, RankCache)], target: &RankCache, one_process: bool) -> bool {
    let mut writers: BTreeMap<u64, usize> = BTreeMap::new();
    let mut reads = BTreeSet::new();
    let mut twice = false;
    for (schedule, source) in bound {
        for fragment in fragments(schedule).unwrap() {
            for byte in 0..fragment.length {
                let at = target.tensors[fragment.target_tensor].address + fragment.target_offset + byte;
                twice |= writers.insert(at, fragment.target_tensor).is_some();
                reads.insert(source.tensors[fragment.source_tensor].address + fragment.source_offset + byte);
            }
        }
    }
    twice || one_process && writers.keys().any(|byte| reads.contains(byte))
}

fn plan(case: &Case, target_rank: usize) -> Plan {
    let engines = (engine("s", &case.source, case), engine("t", &case.target, case));
    let route = Arc::new(Route::new(engines.0, engines.1, false).unwrap());
    let target_rank = target_rank % route.target().num_ranks();
    let (source, target) =
        (blocks(&case.source, Side::Source, case), blocks(&case.target, Side::Target, case));
    Plan::new(route, (Side::Target, target_rank), &source, &target, case.tokens).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn check_refuses_exactly_what_conflicts(
        case in case(),
        rank in 0_usize..8,
        source_places in places(),
        target_places in places(),
        one_process in any::<bool>(),
    ) {
        let plan = plan(&case, rank);
        let target = target_places.lay_out(dense(&plan, Side::Target, plan.made_for().1), 0);
        let mut bound = Vec::new();
        for (index, (source_rank, _)) in plan.rank_pairs().into_iter().enumerate() {
            let source = source_places.lay_out(dense(&plan, Side::Source, source_rank), 8 * index);
            bound.push((bind(&plan, &source, &target).unwrap(), source));
        }
        let checked: Vec<BoundSchedule<'_>> =
            bound.iter().map(|(schedule, source)| BoundSchedule::new(schedule, source, &target)).collect();
        match check(&checked, one_process) {
            Ok(()) => prop_assert!(!conflicts(&bound, &target, one_process)),
            Err(Error::Overlap(_)) => prop_assert!(conflicts(&bound, &target, one_process)),
            Err(other) => prop_assert!(false, "{other:?}"),
        }
    }
}
