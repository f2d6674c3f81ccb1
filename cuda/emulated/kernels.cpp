// The kernels on the host: the same bodies over blocks whose threads run one after another.
//
// A phase is a loop over the threads, forwards or backwards, as are the blocks of a grid: a kernel whose
// threads depend on one another within a phase, or whose blocks do, gives another result in one of them.

#include "kernels.hpp"

#include <cstring>
#include <vector>

using namespace kvferry;

namespace {

// Accesses that a device would refuse: at addresses that are no multiple of what is accessed, or of memory
// that `is_accessible` denies.
thread_local uint64_t refused = 0;
thread_local bool (*is_accessible)(uint64_t address, uint64_t num_bytes) = nullptr;

bool check_access(uint64_t address, uint64_t num_bytes) {
    const bool is_fine = address % num_bytes == 0 && (!is_accessible || is_accessible(address, num_bytes));
    refused += !is_fine;
    return is_fine;
}

template <uint32_t BLOCK_THREADS>
struct HostBlock {
    static constexpr uint32_t THREADS = BLOCK_THREADS;

    uint64_t number;
    uint64_t blocks;
    bool is_backward;

    uint64_t index() const { return number; }
    uint64_t count() const { return blocks; }

    template <class Phase>
    void each_thread(Phase phase) const {
        for (uint32_t turn = 0; turn < THREADS; ++turn) {
            phase(is_backward ? THREADS - 1 - turn : turn);
        }
    }

    template <class Vector>
    static Vector read(uint64_t address) {
        Vector vector{};
        if (check_access(address, sizeof(Vector))) {
            std::memcpy(&vector, reinterpret_cast<const void*>(address), sizeof(Vector));
        }
        return vector;
    }
    template <class Vector>
    static void write(uint64_t address, Vector vector) {
        if (check_access(address, sizeof(Vector))) {
            std::memcpy(reinterpret_cast<void*>(address), &vector, sizeof(Vector));
        }
    }
};

template <uint32_t THREADS, class Kernel>
void each_block(const Grid& grid, Kernel kernel) {
    for (uint32_t turn = 0; turn < grid.blocks; ++turn) {
        const uint32_t number = grid.is_backward ? grid.blocks - 1 - turn : turn;
        kernel(HostBlock<THREADS>{number, grid.blocks, grid.is_backward != 0});
    }
}

// Runs a kernel on a grid of blocks as a device has them, or of a few threads; the number of refused
// accesses, or one where the grid is neither.
template <class Kernel>
uint64_t run(const Grid& grid, Kernel kernel) {
    refused = 0;
    switch (grid.threads) {
        case 256: each_block<256>(grid, kernel); break;
        case 7: each_block<7>(grid, kernel); break;
        default: return 1;
    }
    return refused;
}

}  // namespace

void kvferry_emulated_check_accesses(bool (*check)(uint64_t address, uint64_t num_bytes)) {
    is_accessible = check;
}

extern "C" uint64_t kvferry_emulated_copy_loops(const CopyLoops* copy, const Grid* grid) {
    return run(*grid, [&](auto block) {
        using Block = decltype(block);
        std::vector<Tile<Block>> tiles(2);
        copy_loops(block, *copy, *reinterpret_cast<Tile<Block>(*)[2]>(tiles.data()));
    });
}

extern "C" uint64_t kvferry_emulated_copy_runs(const CopyRuns* copy, const Grid* grid) {
    return run(*grid, [&](auto block) { copy_runs(block, *copy); });
}

extern "C" uint64_t kvferry_emulated_transpose(const Transpose* how, const Grid* grid) {
    const Transposition& transposition = *how->transposition;
    const uint64_t bytes = uint64_t{transposition.matrix_vectors} * transposition.vector_bytes;
    return run(*grid, [&](auto block) {
        std::vector<Bytes16> scratch(bytes / sizeof(Bytes16) + 1, Bytes16{{~0u, ~0u, ~0u, ~0u}});
        transpose(block, *how, scratch.data());
    });
}
