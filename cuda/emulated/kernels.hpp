// The emulated kernels, for whoever launches them.
#pragma once

#include <cstdint>

#include "kvferry/copy_loops.cuh"
#include "kvferry/copy_runs.cuh"
#include "kvferry/transpose.cuh"

// What a launch says of its grid.
struct Grid {
    uint32_t blocks;
    uint32_t threads;
    uint32_t is_backward;
};

// Each returns how many accesses a device would have refused.
extern "C" uint64_t kvferry_emulated_copy_loops(const kvferry::CopyLoops* copy, const Grid* grid);
extern "C" uint64_t kvferry_emulated_copy_runs(const kvferry::CopyRuns* copy, const Grid* grid);
extern "C" uint64_t kvferry_emulated_transpose(const kvferry::Transpose* how, const Grid* grid);
// Has every access of this thread's later kernels checked.
void kvferry_emulated_check_accesses(bool (*check)(uint64_t address, uint64_t num_bytes));
