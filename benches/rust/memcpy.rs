//! The host copier beside `memcpy` over the same pieces: a table of throughputs and their ratio.
//!
//! The contestants take turns, so that whatever else the machine does hits each of them alike; medians
//! of sequential runs differ by more than what is measured here.

mod memory;
mod request;

use std::time::Instant;

use crate::memory::{Case, TOTAL_BYTES, cases};

const ROUNDS: usize = 21;

fn main() {
    println!("{} MiB in random order, medians of {ROUNDS} interleaved rounds", TOTAL_BYTES >> 20);
    println!("{:18} {:>7}  {:22} {:>6} {:>16}", "", "threads", "", "GB/s", "kvferry / memcpy");
    for case in cases() {
        for threads in [1, 2] {
            compare(&case, threads);
        }
    }
}

fn compare(case: &Case, threads: usize) {
    let contestants = case.contestants(threads);
    let mut seconds = vec![Vec::with_capacity(ROUNDS); contestants.len()];
    for round in 0..ROUNDS {
        // There and back: nobody always finds the caches as the same other one has left them.
        for turn in 0..contestants.len() {
            let index = if round % 2 == 0 { turn } else { contestants.len() - 1 - turn };
            let begin = Instant::now();
            (contestants[index].run)();
            seconds[index].push(begin.elapsed().as_secs_f64());
        }
    }
    let medians: Vec<f64> = seconds.into_iter().map(median).collect();
    #[expect(clippy::cast_precision_loss, reason = "a figure with three digits")]
    let gigabytes = TOTAL_BYTES as f64 / 1e9;
    for (rank, (contestant, seconds)) in contestants.iter().zip(&medians).enumerate() {
        let ratio = if rank == 0 { String::new() } else { format!("{:.2}", seconds / medians[0]) };
        println!(
            "{:18} {threads:>7}  {:22} {:>6.1} {ratio:>16}",
            case.name,
            contestant.name,
            gigabytes / seconds
        );
    }
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_unstable_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
