//! Threads: how many take part in a copy, and how they share it.

use std::thread;

/// Bytes below which another thread costs more than it brings: starting one takes about 25 µs, in which
/// a core copies some 500 KiB; at 8 MiB that is a few percent.
pub const MIN_THREAD_BYTES: u64 = 8 << 20;

/// Threads that take part, this one included: at most `threads`, or as many as the machine runs at once
/// where `None`, and fewer where there is little to do.
pub(crate) fn count(total_bytes: u64, threads: Option<usize>) -> usize {
    let available = || thread::available_parallelism().map_or(1, usize::from);
    let useful = usize::try_from(total_bytes / MIN_THREAD_BYTES).unwrap_or(usize::MAX);
    threads.unwrap_or_else(available).min(useful).max(1)
}

/// Does the first part on this thread and each other part on one of its own; returns when all are done.
pub(crate) fn run<T: Sync>(parts: &[T], work: impl Fn(&T) + Sync) {
    let Some((own, others)) = parts.split_first() else { return };
    let work = &work;
    thread::scope(|scope| {
        let start = |part| thread::Builder::new().spawn_scoped(scope, move || work(part)).is_ok();
        let left: Vec<_> = others.iter().filter(|part| !start(*part)).collect();
        work(own);
        for part in left {
            work(part); // no thread could be had for it
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_copies_use_one_thread() {
        assert_eq!(count(0, Some(8)), 1);
        assert_eq!(count(2 * MIN_THREAD_BYTES - 1, Some(8)), 1);
        assert_eq!(count(2 * MIN_THREAD_BYTES, Some(8)), 2);
        assert_eq!(count(100 * MIN_THREAD_BYTES, Some(3)), 3);
        assert_eq!(count(100 * MIN_THREAD_BYTES, Some(0)), 1);
    }
}
