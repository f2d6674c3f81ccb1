//! Three fixed workloads whose instructions are counted, one named by each run: what they cost shows
//! without a clock. The runner collects inside the functions called `measured_…` alone.

mod request;

use std::hint::black_box;
use std::{env, slice};

use kvferry_benches::touched_memory;
use kvferry_core::memory::cache::RankCache;
use kvferry_core::moves::bind::bind;
use kvferry_core::moves::expand::{Fragment, fragments};
use kvferry_core::moves::overlap::BoundSchedule;
use kvferry_core::planning::plan::Plan;
use kvferry_core::side::Side;

use crate::request::{Request, Shape};

/// Bytes of an element of bfloat16.
const ITEM_BYTES: u64 = 2;
const USAGE: &str = "name one of plan, descriptors, copy";

/// A request of 32,768 tokens from TP 8 and 16 tokens a block to TP 4 and 64, 80 layers.
fn long_request() -> Request {
    let source = Shape { layers: 80, tp_size: 8, tokens_per_block: 16, layout: "HND" };
    let target = Shape { layers: 80, tp_size: 4, tokens_per_block: 64, layout: "HND" };
    Request::new(source, target, 32_768)
}

/// A request of 256 tokens, 1 MiB, that is laid out anew.
fn short_request() -> Request {
    let source = Shape { layers: 1, tp_size: 1, tokens_per_block: 16, layout: "HND" };
    let target = Shape { layers: 1, tp_size: 1, tokens_per_block: 64, layout: "NHD" };
    Request::new(source, target, 256)
}

fn cache(plan: &Plan, side: Side) -> RankCache {
    let engine = plan.route().engine(side);
    RankCache::dense(engine.clone(), 0, |group| plan.block_count(side, group)).expect("tensors that fit")
}

#[inline(never)]
fn measured_plan(request: &Request) -> Plan {
    request.plan()
}

#[inline(never)]
fn measured_descriptors(plan: &Plan, source: &RankCache, target: &RankCache) -> Vec<Fragment> {
    let schedule = bind(plan, source, target).expect("blocks inside the tensors");
    fragments(&schedule).expect("few enough runs")
}

#[inline(never)]
fn measured_copy(bound: &BoundSchedule<'_>) {
    copy(bound);
}

fn copy(bound: &BoundSchedule<'_>) {
    // SAFETY: `main` has bound the schedule to leaked memory that nobody else touches.
    unsafe { kvferry_copy::copy(slice::from_ref(bound), Some(1)) };
}

fn main() {
    let workload = env::args().nth(1).expect(USAGE);
    let long = long_request();
    match workload.as_str() {
        "plan" => drop(black_box(measured_plan(&long))),
        "descriptors" => {
            let plan = long.plan();
            let [source, target] = [Side::Source, Side::Target].map(|side| cache(&plan, side));
            drop(black_box(measured_descriptors(&plan, &source, &target)));
        }
        "copy" => {
            let plan = short_request().plan();
            let [source, target] = [Side::Source, Side::Target].map(|side| {
                cache(&plan, side).map(|tensor| {
                    let bytes = usize::try_from(tensor.extent_bytes(ITEM_BYTES)).expect("64 bits");
                    tensor.address = touched_memory(bytes).expose_provenance() as u64;
                })
            });
            let schedule = bind(&plan, &source, &target).expect("blocks inside the tensors");
            let bound = BoundSchedule::new(&schedule, &source, &target);
            copy(&bound); // the first one also asks what the machine is
            measured_copy(&bound);
        }
        other => panic!("{other:?}: {USAGE}"),
    }
}
