//! The pool: the few threads that share large copies with the caller's.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::{ptr, thread};

use rayon_core::{ThreadPool, ThreadPoolBuilder};

use crate::fork;

/// Bytes that each thread must have to copy: handing work to another takes some 10 µs, in which a core
/// copies 200 KiB, and below that all of it is in cache.
pub const MIN_THREAD_BYTES: u64 = 4 << 20;
/// Most threads that take part in a copy: memory is not faster for more.
pub const MAX_THREADS: usize = 16;

/// Threads that take part where a call does not say; zero: as many as the machine runs at once.
static DEFAULT_THREADS: AtomicUsize = AtomicUsize::new(0);
/// The pool of this process; null until it is needed.
static POOL: AtomicPtr<ThreadPool> = AtomicPtr::new(ptr::null_mut());

/// Threads that take part where a call does not say.
pub fn default_threads() -> usize {
    match DEFAULT_THREADS.load(Ordering::Relaxed) {
        0 => thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS),
        threads => threads,
    }
}

/// Sets how many threads take part where a call does not say; `None`: as many as the machine runs at once.
pub fn set_default_threads(threads: Option<NonZeroUsize>) {
    DEFAULT_THREADS.store(threads.map_or(0, usize::from).min(MAX_THREADS), Ordering::Relaxed);
}

/// Threads that take part, the caller's included: at most `threads`, and fewer where there is little to do.
pub(crate) fn count(total_bytes: u64, threads: Option<usize>) -> usize {
    let useful = usize::try_from(total_bytes / MIN_THREAD_BYTES).unwrap_or(usize::MAX);
    if useful <= 1 {
        return 1; // asking the machine takes longer than a small copy
    }
    threads.unwrap_or_else(default_threads).min(useful).clamp(1, MAX_THREADS)
}

/// Does the first part on this thread and the others on the pool's; returns when all are done.
pub(crate) fn run<T: Sync>(parts: &[T], work: impl Fn(&T) + Sync) {
    let work = &work;
    let Some((own, others)) = parts.split_first() else { return };
    match if others.is_empty() { None } else { pool() } {
        Some(pool) => pool.in_place_scope(|scope| {
            for part in others {
                scope.spawn(move |_| work(part));
            }
            work(own);
        }),
        None => parts.iter().for_each(work), // also where no thread is to be had
    }
}

/// The pool of this process, made when it is first needed.
fn pool() -> Option<&'static ThreadPool> {
    let mut pool = POOL.load(Ordering::Acquire);
    if pool.is_null() {
        let others = MAX_THREADS - 1; // the caller's takes part
        let available = thread::available_parallelism().map_or(1, usize::from);
        let builder = ThreadPoolBuilder::new().thread_name(|index| format!("kvferry-{index}"));
        let made = builder.num_threads(available.min(others)).build().ok()?;
        if !fork::tell_children(forget) {
            return None;
        }
        pool = Box::into_raw(Box::new(made));
        let none = ptr::null_mut();
        if let Err(theirs) = POOL.compare_exchange(none, pool, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: nobody else has seen it; another thread was faster.
            drop(unsafe { Box::from_raw(pool) });
            pool = theirs;
        }
    }
    // SAFETY: whatever `POOL` has pointed to is never given back.
    unsafe { pool.as_ref() }
}

/// A forked child makes a pool of its own, as no thread comes along, and leaves its parent's where it is.
extern "C" fn forget() {
    POOL.store(ptr::null_mut(), Ordering::Release);
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn small_copies_use_one_thread() {
        assert_eq!(count(0, Some(8)), 1);
        assert_eq!(count(2 * MIN_THREAD_BYTES - 1, Some(8)), 1);
        assert_eq!(count(2 * MIN_THREAD_BYTES, Some(8)), 2);
        assert_eq!(count(100 * MIN_THREAD_BYTES, Some(3)), 3);
        assert_eq!(count(100 * MIN_THREAD_BYTES, Some(0)), 1);
        assert_eq!(count(u64::MAX, Some(1000)), MAX_THREADS);
    }

    #[test]
    fn threads_that_need_the_pool_first_at_once_share_it() {
        let (total, start) = (AtomicU64::new(0), Barrier::new(8));
        let first_use = || {
            start.wait();
            let pool = pool().map(ptr::from_ref).map(<*const ThreadPool>::addr);
            run(&(1..=10).collect::<Vec<u64>>(), |part| {
                total.fetch_add(*part, Ordering::Relaxed);
            });
            pool
        };
        let pools: Vec<Option<usize>> = thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(first_use)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(pools[0].is_some() && pools.iter().all(|pool| *pool == pools[0]));
        // Every part was done once.
        assert_eq!(total.into_inner(), 8 * 55);
    }
}
