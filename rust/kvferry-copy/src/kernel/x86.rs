//! The vectors of x86-64, and the loops compiled for them.

use std::arch::x86_64::{
    __m256i, __m512i, _MM_HINT_T1, _mm_prefetch, _mm_sfence, _mm256_loadu_si256, _mm256_storeu_si256,
    _mm256_stream_si256, _mm512_loadu_si512, _mm512_storeu_si512, _mm512_stream_si512,
};

use super::pieces::{Vector, copy_vectors, stream_vectors};
use crate::work::Work;

macro_rules! vector {
    ($register:ty, $load:ident, $store:ident, $stream:ident) => {
        impl Vector for $register {
            const BYTES: usize = size_of::<Self>();

            #[inline(always)]
            unsafe fn load(source: *const u8) -> Self {
                // SAFETY: the caller guarantees the bytes and the machine.
                unsafe { $load(source.cast()) }
            }

            #[inline(always)]
            unsafe fn store(self, target: *mut u8) {
                // SAFETY: the caller guarantees the bytes and the machine.
                unsafe { $store(target.cast(), self) }
            }

            #[inline(always)]
            unsafe fn stream(self, target: *mut u8) {
                // SAFETY: the caller guarantees the bytes, their alignment and the machine.
                unsafe { $stream(target.cast(), self) }
            }

            #[inline(always)]
            fn prefetch(source: *const u8) {
                // SAFETY: a prefetch of any address does nothing that can be observed.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(source.cast()) }
            }
        }
    };
}

vector!(__m256i, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_stream_si256);
vector!(__m512i, _mm512_loadu_si512, _mm512_storeu_si512, _mm512_stream_si512);

macro_rules! kernels {
    ($feature:literal, $register:ty, $copy:ident, $stream:ident) => {
        /// Through the caches.
        ///
        /// # Safety
        ///
        /// As for [`super::Kernel::run`].
        #[target_feature(enable = $feature)]
        pub(super) unsafe fn $copy(work: &Work<'_>) {
            // SAFETY: the caller guarantees the memory, and the feature the machine.
            unsafe { copy_vectors::<$register>(work) }
        }

        /// Past the caches.
        ///
        /// # Safety
        ///
        /// As for [`super::Kernel::run`].
        #[target_feature(enable = $feature)]
        pub(super) unsafe fn $stream(work: &Work<'_>) {
            // SAFETY: the caller guarantees the memory, and the feature the machine.
            unsafe { stream_vectors::<$register>(work) }
            _mm_sfence(); // streamed writes are seen in no order until then
        }
    };
}

kernels!("avx2", __m256i, copy_avx2, stream_avx2);
kernels!("avx512f", __m512i, copy_avx512, stream_avx512);
