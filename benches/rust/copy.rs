//! Host copies, followed from version to version; `memcpy.rs` compares them with `memcpy`.

mod memory;
mod request;

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput};

use crate::memory::{TOTAL_BYTES, cases};

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    for case in cases() {
        let mut group = criterion.benchmark_group(case.name);
        // One copy takes tens of milliseconds.
        group.sample_size(20).sampling_mode(SamplingMode::Flat).measurement_time(Duration::from_secs(2));
        group.warm_up_time(Duration::from_secs(1));
        group.throughput(Throughput::Bytes(TOTAL_BYTES));
        for threads in [1, 2] {
            for contestant in case.contestants(threads) {
                let id = BenchmarkId::new(contestant.name, threads);
                group.bench_function(id, |bencher| bencher.iter(&contestant.run));
            }
        }
    }
    criterion.final_summary();
}
