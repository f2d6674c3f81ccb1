// A block of threads: the one thing that kernels know of what runs them.
//
// A kernel's body is a template over its block. It runs in phases: `each_thread` hands a phase to every
// thread, and none begins the next phase before all have ended this one. What lies outside of phases is
// the same for all threads. A host program runs the same bodies with a block of its own, in which a phase
// is a loop.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define KVFERRY_INLINE __device__ __forceinline__
#define KVFERRY_UNROLL _Pragma("unroll")
#define KVFERRY_ROLLED _Pragma("unroll 1")
#else
#define KVFERRY_INLINE inline
#define KVFERRY_UNROLL
#define KVFERRY_ROLLED
#endif

namespace kvferry {

// Vectors that a thread reads before it writes the first of them: enough bytes in flight for all
// threads of a multiprocessor to hide what a read from memory takes.
constexpr uint32_t UNROLL = 4;

// The widest vector, which one instruction reads or writes.
struct alignas(16) Bytes16 {
    uint32_t words[4];
};

#if defined(__CUDACC__)

// Threads of a block on a device: four blocks fill a multiprocessor's registers at 64 a thread.
constexpr uint32_t DEVICE_THREADS = 256;

// A block of a device, whose threads run at once.
struct DeviceBlock {
    static constexpr uint32_t THREADS = DEVICE_THREADS;

    KVFERRY_INLINE uint64_t index() const { return blockIdx.x; }
    KVFERRY_INLINE uint64_t count() const { return gridDim.x; }

    template <class Phase>
    KVFERRY_INLINE void each_thread(Phase phase) const {
        phase(threadIdx.x);
        __syncthreads();
    }

    // Memory is read once and written once: both pass through the caches as what is not needed again.
    // Reads stay coherent, since what ran before on the stream may have written there.
    template <class Vector>
    KVFERRY_INLINE static Vector read(uint64_t address) {
        return __ldcs(reinterpret_cast<const Vector*>(address));
    }
    template <class Vector>
    KVFERRY_INLINE static void write(uint64_t address, Vector vector) {
        __stcs(reinterpret_cast<Vector*>(address), vector);
    }
};

template <>
KVFERRY_INLINE Bytes16 DeviceBlock::read<Bytes16>(uint64_t address) {
    const uint4 words = __ldcs(reinterpret_cast<const uint4*>(address));
    return {{words.x, words.y, words.z, words.w}};
}
template <>
KVFERRY_INLINE void DeviceBlock::write<Bytes16>(uint64_t address, Bytes16 vector) {
    const uint32_t* words = vector.words;
    __stcs(reinterpret_cast<uint4*>(address), make_uint4(words[0], words[1], words[2], words[3]));
}
template <>
KVFERRY_INLINE uint64_t DeviceBlock::read<uint64_t>(uint64_t address) {
    return __ldcs(reinterpret_cast<const unsigned long long*>(address));
}
template <>
KVFERRY_INLINE void DeviceBlock::write<uint64_t>(uint64_t address, uint64_t vector) {
    __stcs(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(vector));
}

#endif

// Calls `work` with a vector of so many bytes, a power of two up to 16.
template <class Work>
KVFERRY_INLINE void with_vector(uint32_t vector_bytes, Work work) {
    switch (vector_bytes) {
        case 16: return work(Bytes16{});
        case 8: return work(uint64_t{});
        case 4: return work(uint32_t{});
        case 2: return work(uint16_t{});
        default: return work(uint8_t{});
    }
}

}  // namespace kvferry
