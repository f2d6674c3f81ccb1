//! What the machine can do at best: `memcpy`, and a sequential copy that streams past the caches.
//!
//! Also a C library, so that benches in Python measure these in their own process, between the others.

use std::alloc::{Layout, alloc, handle_alloc_error};
use std::{ptr, slice, thread};

/// Bytes of a huge page, and what memory is aligned to here.
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Bytes of a cache line, the unit of a stream.
const LINE_BYTES: usize = 64;

/// Memory that exists, so that no copy pays for its first touch, and is never given back. Huge pages back
/// it where the machine gives them to those who ask, as numpy does for every large array.
///
/// # Panics
///
/// If no memory has that many bytes.
pub fn touched_memory(num_bytes: usize) -> *mut u8 {
    let layout = Layout::from_size_align(num_bytes, HUGE_PAGE_BYTES).expect("a size that fits");
    // SAFETY: no bench asks for nothing.
    let memory = unsafe { alloc(layout) };
    if memory.is_null() {
        handle_alloc_error(layout);
    }
    ask_for_huge_pages(memory, num_bytes);
    // SAFETY: as many bytes were allocated.
    unsafe { memory.write_bytes(1, num_bytes) };
    memory
}

#[cfg(target_os = "linux")]
fn ask_for_huge_pages(memory: *mut u8, num_bytes: usize) {
    use std::ffi::{c_int, c_void};
    unsafe extern "C" {
        fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int;
    }
    const MADV_HUGEPAGE: c_int = 14;
    // SAFETY: advice about memory that was just allocated changes no byte of it. A kernel without huge
    // pages refuses it, and then there are none.
    unsafe { madvise(memory.cast(), num_bytes, MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn ask_for_huge_pages(_memory: *mut u8, _num_bytes: usize) {}

/// Copies contiguous bytes by the C library's `memcpy`, every thread an equal part.
///
/// # Safety
///
/// Both ends must be valid for so many bytes, used by nobody else meanwhile, and not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bench_memcpy(target: *mut u8, source: *const u8, num_bytes: usize, threads: usize) {
    // SAFETY: the caller guarantees both ends.
    unsafe { in_parts(target, source, num_bytes, threads, |t, s, n| ptr::copy_nonoverlapping(s, t, n)) };
}

/// Copies `count` pieces of `num_bytes` by `memcpy`, every thread an equal part of them.
///
/// # Safety
///
/// Both tables must hold `count` addresses, and each piece be as for [`bench_memcpy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bench_memcpy_each(
    targets: *const usize,
    sources: *const usize,
    count: usize,
    num_bytes: usize,
    threads: usize,
) {
    // SAFETY: the caller guarantees both tables.
    let (targets, sources) =
        unsafe { (slice::from_raw_parts(targets, count), slice::from_raw_parts(sources, count)) };
    let copy = |begin: usize, end: usize| {
        for (target, source) in targets[begin..end].iter().zip(&sources[begin..end]) {
            let (target, source) =
                (ptr::with_exposed_provenance_mut(*target), ptr::with_exposed_provenance(*source));
            // SAFETY: the caller guarantees each piece.
            unsafe { ptr::copy_nonoverlapping::<u8>(source, target, num_bytes) };
        }
    };
    share(count, threads, 1, copy);
}

/// Whether this machine streams vectors of so many bytes.
#[unsafe(no_mangle)]
pub extern "C" fn bench_can_stream(vector_bytes: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    match vector_bytes {
        32 => return is_x86_feature_detected!("avx2"),
        64 => return is_x86_feature_detected!("avx512f"),
        _ => {}
    }
    let _ = vector_bytes;
    false
}

/// Copies contiguous bytes past the caches in vectors of so many bytes, every thread an equal part.
///
/// # Panics
///
/// Where [`bench_can_stream`] says no, and for a target or size that is not of whole cache lines.
///
/// # Safety
///
/// As for [`bench_memcpy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bench_stream(
    target: *mut u8,
    source: *const u8,
    num_bytes: usize,
    threads: usize,
    vector_bytes: usize,
) {
    assert!(bench_can_stream(vector_bytes), "no streams of {vector_bytes} bytes");
    assert!(target.addr().is_multiple_of(LINE_BYTES) && num_bytes.is_multiple_of(LINE_BYTES), "whole lines");
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller guarantees both ends; the machine was asked, and parts are of whole lines.
    unsafe {
        match vector_bytes {
            32 => in_parts(target, source, num_bytes, threads, |t, s, n| x86::stream_256(t, s, n)),
            _ => in_parts(target, source, num_bytes, threads, |t, s, n| x86::stream_512(t, s, n)),
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (source, threads);
}

/// Calls `copy` with (target, source, bytes) of every thread's part.
///
/// # Safety
///
/// Both ends must be valid for so many bytes, and used by nobody else meanwhile.
unsafe fn in_parts(
    target: *mut u8,
    source: *const u8,
    num_bytes: usize,
    threads: usize,
    copy: impl Fn(*mut u8, *const u8, usize) + Sync,
) {
    let (target, source) = (target.expose_provenance(), source.expose_provenance());
    share(num_bytes, threads, LINE_BYTES, |begin, end| {
        let (target, source) = (target + begin, source + begin);
        copy(ptr::with_exposed_provenance_mut(target), ptr::with_exposed_provenance(source), end - begin);
    });
}

/// Calls `work` with the (begin, end) of every thread's part of `total`, cut at multiples of `unit`.
fn share(total: usize, threads: usize, unit: usize, work: impl Fn(usize, usize) + Sync) {
    let part = total.div_ceil(threads).next_multiple_of(unit);
    let (work, part_of) =
        (&work, |index: usize| ((index * part).min(total), ((index + 1) * part).min(total)));
    thread::scope(|scope| {
        for index in 1..threads {
            let (begin, end) = part_of(index);
            scope.spawn(move || work(begin, end));
        }
        let (begin, end) = part_of(0);
        work(begin, end);
    });
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512, _mm512_stream_si512,
    };

    macro_rules! stream {
        ($name:ident, $feature:literal, $bytes:literal, $load:ident, $stream:ident) => {
            /// # Safety
            ///
            /// Both ends must be valid for so many bytes, whole lines of `target`.
            #[target_feature(enable = $feature)]
            pub unsafe fn $name(target: *mut u8, source: *const u8, num_bytes: usize) {
                for line in (0..num_bytes).step_by(super::LINE_BYTES) {
                    for offset in (line..line + super::LINE_BYTES).step_by($bytes) {
                        // SAFETY: the caller guarantees the bytes and their alignment.
                        unsafe { $stream(target.add(offset).cast(), $load(source.add(offset).cast())) };
                    }
                }
                _mm_sfence(); // streamed writes are seen in no order until then
            }
        };
    }

    stream!(stream_256, "avx2", 32, _mm256_loadu_si256, _mm256_stream_si256);
    stream!(stream_512, "avx512f", 64, _mm512_loadu_si512, _mm512_stream_si512);
}
