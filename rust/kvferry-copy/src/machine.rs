//! What the machine has.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

/// Assumed where the machine does not say: what a core of most servers can use of it.
const USUAL_LAST_LEVEL_CACHE_BYTES: u64 = 32 << 20;

/// Bytes of the cache before memory.
pub(crate) fn last_level_cache_bytes() -> u64 {
    /// Zero until it is known. Not a once-lock: one that another thread holds during a fork is never let go
    /// in the child.
    static BYTES: AtomicU64 = AtomicU64::new(0);
    match BYTES.load(Ordering::Relaxed) {
        0 => {
            let bytes = read().unwrap_or(USUAL_LAST_LEVEL_CACHE_BYTES);
            BYTES.store(bytes, Ordering::Relaxed);
            bytes
        }
        bytes => bytes,
    }
}

/// What Linux says of the first processor's caches, the largest of which is the last.
fn read() -> Option<u64> {
    let caches = fs::read_dir("/sys/devices/system/cpu/cpu0/cache").ok()?;
    let size = |cache: fs::DirEntry| parse(fs::read_to_string(cache.path().join("size")).ok()?.trim());
    caches.filter_map(|cache| size(cache.ok()?)).max()
}

/// A size such as `32768K`.
fn parse(size: &str) -> Option<u64> {
    let (digits, unit) = match size.strip_suffix('K') {
        Some(digits) => (digits, 1 << 10),
        None => (size.strip_suffix('M')?, 1 << 20),
    };
    digits.parse::<u64>().ok()?.checked_mul(unit).filter(|bytes| *bytes > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_the_kernels_units() {
        assert_eq!(parse("32768K"), Some(32 << 20));
        assert_eq!(parse("32M"), Some(32 << 20));
        for nonsense in ["", "K", "0K", "1.5M", "99999999999999999999K", "12"] {
            assert_eq!(parse(nonsense), None);
        }
    }
}
