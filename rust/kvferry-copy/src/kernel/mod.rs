//! Kernels: how the pieces of a work are copied, chosen by what the machine can do and what is copied.
//!
//! A *stream* writes past the caches, which spares memory the read of what is about to be overwritten, and
//! asks for what it reads next ahead of time. That pays once a copy outgrows the last-level cache; smaller
//! ones stay in it, for whoever reads them next.

mod pieces;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::env;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::machine;
use crate::work::Work;

/// Names the one kernel to use, whatever is copied.
const VARIABLE: &str = "KVFERRY_KERNEL";

/// Bytes of a piece of a stream: a page, beyond which neither prefetchers nor translations reach.
const STREAM_PIECE_BYTES: u64 = 4096;
/// Bytes of a piece otherwise: threads share work out by it, and what a call for each costs is nothing.
const PLAIN_PIECE_BYTES: u64 = 256 << 10;
/// Shortest runs that are streamed. Lines that a run fills in part are written through the cache.
const MIN_STREAM_RUN_BYTES: u64 = 256;
/// Bytes of a cache line: shorter runs are streamed where they are whole lines.
const LINE_BYTES: u64 = 64;

/// What vectors a kernel moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Vectors {
    /// Whatever the C library's `memcpy` does.
    Portable,
    /// 32 bytes at a time.
    Avx2,
    /// 64 bytes at a time.
    Avx512,
}

/// A way to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    vectors: Vectors,
    streams: bool,
}

/// All kernels by name, the best last.
const KERNELS: [(&str, Kernel); 5] = [
    ("portable", Kernel { vectors: Vectors::Portable, streams: false }),
    ("avx2", Kernel { vectors: Vectors::Avx2, streams: false }),
    ("avx512", Kernel { vectors: Vectors::Avx512, streams: false }),
    ("avx2-stream", Kernel { vectors: Vectors::Avx2, streams: true }),
    ("avx512-stream", Kernel { vectors: Vectors::Avx512, streams: true }),
];

/// The kernels that this machine can run, by name.
pub fn supported() -> impl Iterator<Item = (&'static str, Kernel)> {
    KERNELS.into_iter().filter(|(_, kernel)| kernel.vectors.is_supported())
}

/// The kernel that the environment variable `KVFERRY_KERNEL` names; the error says what it may name here.
/// Set to nothing is as good as unset.
pub fn forced() -> Result<Option<Kernel>, String> {
    const UNREAD: usize = usize::MAX;
    /// Index of the kernel, past all of them where none is named. Not a once-lock: one that another thread
    /// holds during a fork is never let go in the child.
    static FORCED: AtomicUsize = AtomicUsize::new(UNREAD);
    let mut forced = FORCED.load(Ordering::Relaxed);
    if forced == UNREAD {
        forced = read_forced()?;
        FORCED.store(forced, Ordering::Relaxed);
    }
    Ok(KERNELS.get(forced).map(|(_, kernel)| *kernel))
}

fn read_forced() -> Result<usize, String> {
    let Some(name) = env::var_os(VARIABLE).filter(|name| !name.is_empty()) else { return Ok(KERNELS.len()) };
    let is_named = |(known, kernel): &(&str, Kernel)| name == *known && kernel.vectors.is_supported();
    KERNELS.iter().position(is_named).ok_or_else(|| {
        let names: Vec<&str> = supported().map(|(name, _)| name).collect();
        format!("{VARIABLE}={} is not one of {}", name.display(), names.join(", "))
    })
}

impl Vectors {
    fn is_supported(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => is_x86_feature_detected!("avx512f"),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The widest vectors that this machine has.
    fn best() -> Self {
        let widest = [Self::Avx512, Self::Avx2].into_iter().find(|vectors| vectors.is_supported());
        widest.unwrap_or(Self::Portable)
    }
}

/// The kernel for a copy of so many bytes in all.
pub(crate) fn choose(total_bytes: u64) -> Kernel {
    let outgrows_cache = total_bytes >= machine::last_level_cache_bytes() / 2; // and as much is read
    let vectors = Vectors::best();
    let chosen = Kernel { vectors, streams: outgrows_cache && vectors != Vectors::Portable };
    forced().ok().flatten().unwrap_or(chosen)
}

/// The kernel for what is read again at once, whatever its size.
pub(crate) fn cached() -> Kernel {
    let vectors = forced().ok().flatten().map_or_else(Vectors::best, |kernel| kernel.vectors);
    Kernel { vectors, streams: false }
}

impl Kernel {
    /// Bytes of the pieces into which it wants its work cut.
    pub fn piece_bytes(self) -> u64 {
        if self.streams { STREAM_PIECE_BYTES } else { PLAIN_PIECE_BYTES }
    }

    /// Copies every piece of `work`.
    ///
    /// # Safety
    ///
    /// Each piece must lie in memory that is valid for reads at its source and for writes at its target,
    /// and no piece may overlap another's target. The machine must support the kernel.
    pub(crate) unsafe fn run(self, work: &Work<'_>) {
        let is_long = work.piece_bytes() >= MIN_STREAM_RUN_BYTES;
        let is_whole_lines = || work.target_alignment() == LINE_BYTES;
        let streams = self.streams && (is_long || is_whole_lines());
        // SAFETY: the caller guarantees the memory and the machine.
        unsafe {
            match (self.vectors, streams) {
                #[cfg(target_arch = "x86_64")]
                (Vectors::Avx2, false) => x86::copy_avx2(work),
                #[cfg(target_arch = "x86_64")]
                (Vectors::Avx512, false) => x86::copy_avx512(work),
                #[cfg(target_arch = "x86_64")]
                (Vectors::Avx2, true) => x86::stream_avx2(work),
                #[cfg(target_arch = "x86_64")]
                (Vectors::Avx512, true) => x86::stream_avx512(work),
                _ => pieces::copy_each(work),
            }
        }
    }
}
