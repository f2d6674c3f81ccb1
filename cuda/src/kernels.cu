// The entry points of the kernels.

#include "kvferry/copy_loops.cuh"
#include "kvferry/copy_runs.cuh"
#include "kvferry/transpose.cuh"

using kvferry::DEVICE_THREADS;
using kvferry::DeviceBlock;

// Blocks that must fit on a multiprocessor at once; it bounds the registers of a thread at 64.
constexpr int MIN_BLOCKS = 4;

extern "C" __global__ void __launch_bounds__(DEVICE_THREADS, MIN_BLOCKS)
    kvferry_copy_loops(const kvferry::CopyLoops copy) {
    __shared__ kvferry::Tile<DeviceBlock> tiles[2];
    kvferry::copy_loops(DeviceBlock{}, copy, tiles);
}

extern "C" __global__ void __launch_bounds__(DEVICE_THREADS, MIN_BLOCKS)
    kvferry_copy_runs(const kvferry::CopyRuns copy) {
    kvferry::copy_runs(DeviceBlock{}, copy);
}

extern "C" __global__ void __launch_bounds__(DEVICE_THREADS, MIN_BLOCKS)
    kvferry_transpose(const kvferry::Transpose transpose) {
    extern __shared__ kvferry::Bytes16 scratch[];
    kvferry::transpose(DeviceBlock{}, transpose, scratch);
}
