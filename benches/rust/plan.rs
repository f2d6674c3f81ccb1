//! Planning, binding and expanding one request of a model of Llama 3.1 70B's geometry that moves from
//! 8 TP ranks with 16 tokens a block to 4 ranks with 64.
//!
//! Elements are what the result holds: pieces of blocks for a plan and its binding, fragments for an
//! expansion. A plan must cost a few nanoseconds a piece, whatever the layers and heads.

mod request;

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput};
use kvferry_core::memory::cache::RankCache;
use kvferry_core::moves::bind::bind;
use kvferry_core::moves::expand::{Fragment, fragments};
use kvferry_core::moves::schedule::Schedule;
use kvferry_core::planning::plan::Plan;
use kvferry_core::side::Side;

use crate::request::{Request, Shape};

const LONG_PROMPT_TOKENS: u64 = 32_768;
const LONGEST_PROMPT_TOKENS: u64 = 1 << 20;

fn request(target_layout: &'static str, tokens: u64) -> Request {
    let source = Shape { layers: 80, tp_size: 8, tokens_per_block: 16, layout: "HND" };
    let target = Shape { layers: 80, tp_size: 4, tokens_per_block: 64, layout: target_layout };
    Request::new(source, target, tokens)
}

/// One rank's tensors without memory: binding and expanding only count.
fn unbacked(plan: &Plan, side: Side) -> RankCache {
    let engine = plan.route().engine(side);
    RankCache::dense(engine.clone(), 0, |group| plan.block_count(side, group)).expect("tensors that fit")
}

fn bound(plan: &Plan) -> Schedule {
    let (source, target) = (unbacked(plan, Side::Source), unbacked(plan, Side::Target));
    bind(plan, &source, &target).expect("blocks inside the tensors")
}

fn expand(schedule: &Schedule) -> Vec<Fragment> {
    fragments(schedule).expect("few enough runs")
}

fn planning(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("plan");
    for tokens in [LONG_PROMPT_TOKENS, LONGEST_PROMPT_TOKENS] {
        let request = request("HND", tokens);
        let plan = request.plan();
        let (source, target) = (unbacked(&plan, Side::Source), unbacked(&plan, Side::Target));
        group.throughput(Throughput::Elements(plan.stretches(0).len() as u64));
        group.bench_function(BenchmarkId::new("new", tokens), |bencher| bencher.iter(|| request.plan()));
        group.bench_function(BenchmarkId::new("bind", tokens), |bencher| {
            bencher.iter(|| bind(&plan, &source, &target).expect("blocks inside the tensors"));
        });
    }
}

fn expanding(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("fragments");
    // Millions of fragments take a good part of a second.
    group.sample_size(10).sampling_mode(SamplingMode::Flat).measurement_time(Duration::from_secs(3));
    let cases = [("HND", LONG_PROMPT_TOKENS), ("NHD", LONG_PROMPT_TOKENS), ("HND", LONGEST_PROMPT_TOKENS)];
    for (target_layout, tokens) in cases {
        let schedule = bound(&request(target_layout, tokens).plan());
        group.throughput(Throughput::Elements(expand(&schedule).len() as u64));
        let id = BenchmarkId::new(format!("HND to {target_layout}"), tokens);
        group.bench_function(id, |bencher| bencher.iter_with_large_drop(|| expand(&schedule)));
    }
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    planning(&mut criterion);
    expanding(&mut criterion);
    criterion.final_summary();
}
