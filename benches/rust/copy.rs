//! Host copies by what is moved and by threads, followed from version to version, and the machine's limits.

mod memory;
mod request;

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput};
use kvferry_benches::{bench_can_stream, bench_memcpy, bench_stream};

use crate::memory::TOTAL_BYTES;

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let [source, target] = memory::memory();
    let mut group = criterion.benchmark_group("copy");
    // One copy takes tens of milliseconds.
    group.sample_size(10).sampling_mode(SamplingMode::Flat).measurement_time(Duration::from_secs(1));
    group.warm_up_time(Duration::from_millis(300));
    group.throughput(Throughput::Bytes(TOTAL_BYTES as u64));
    for threads in [1, 2] {
        group.bench_function(BenchmarkId::new("limit: memcpy, contiguous", threads), |bencher| {
            // SAFETY: both are leaked memory of that size, which nothing else touches meanwhile.
            bencher.iter(|| unsafe { bench_memcpy(target, source, TOTAL_BYTES, threads) });
        });
        for vector_bytes in [32, 64].into_iter().filter(|bytes| bench_can_stream(*bytes)) {
            let name = format!("limit: stream of {vector_bytes} bytes, contiguous");
            group.bench_function(BenchmarkId::new(name, threads), |bencher| {
                // SAFETY: as above.
                bencher.iter(|| unsafe { bench_stream(target, source, TOTAL_BYTES, threads, vector_bytes) });
            });
        }
    }
    for case in memory::cases([source, target]) {
        for threads in [1, 2] {
            let id = BenchmarkId::new(&case.name, threads);
            group.bench_function(id, |bencher| bencher.iter(|| case.copy(threads)));
        }
    }
    group.finish();
    criterion.final_summary();
}
