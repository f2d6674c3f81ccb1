// Contiguous copies of any lengths and alignments: the widest vectors that both ends allow, and single
// bytes before and after them.
#pragma once

#include "records.cuh"

namespace kvferry {

constexpr uint32_t WIDEST_BYTES = sizeof(Bytes16);

template <class Block>
constexpr uint64_t TILE_BYTES = Block::THREADS * UNROLL * WIDEST_BYTES;

struct CopyRuns {
    const Run* runs;
    uint64_t num_tiles;
    uint32_t num_runs;
};

// A thread's part of copying so many bytes, no more than a tile.
template <class Vector, class Block>
KVFERRY_INLINE void copy_run(uint64_t source, uint64_t target, uint32_t num_bytes, uint32_t thread) {
    constexpr uint32_t WIDTH = sizeof(Vector);
    const uint32_t misaligned = static_cast<uint32_t>(-target & (WIDTH - 1));
    const uint32_t before = misaligned < num_bytes ? misaligned : num_bytes;
    const uint32_t num_vectors = (num_bytes - before) / WIDTH;
    const uint32_t after = before + num_vectors * WIDTH;
    KVFERRY_ROLLED  // a tile is one turn
    for (uint32_t first = thread; first < num_vectors; first += UNROLL * Block::THREADS) {
        Vector held[UNROLL] = {};
        KVFERRY_UNROLL
        for (uint32_t turn = 0; turn < UNROLL; ++turn) {
            const uint32_t vector = first + turn * Block::THREADS;
            if (vector < num_vectors) {
                held[turn] = Block::template read<Vector>(source + before + vector * WIDTH);
            }
        }
        KVFERRY_UNROLL
        for (uint32_t turn = 0; turn < UNROLL; ++turn) {
            const uint32_t vector = first + turn * Block::THREADS;
            if (vector < num_vectors) {
                Block::template write<Vector>(target + before + vector * WIDTH, held[turn]);
            }
        }
    }
    // Fewer than a vector's bytes on either side of the vectors.
    const uint32_t single = before + num_bytes - after;
    for (uint32_t byte = thread; byte < single; byte += Block::THREADS) {
        const uint32_t at = byte < before ? byte : after + byte - before;
        Block::template write<uint8_t>(target + at, Block::template read<uint8_t>(source + at));
    }
}

// Copies every tile that is this block's turn. Tiles begin at multiples of the widest vector in the target,
// so that only the ends of a run are not whole vectors.
template <class Block>
KVFERRY_INLINE void copy_runs(const Block& block, const CopyRuns& copy) {
    block.each_thread([&](uint32_t thread) {
        uint32_t index = 0;
        for (uint64_t tile = block.index(); tile < copy.num_tiles; tile += block.count()) {
            index = find_tile(copy.runs, copy.num_runs, tile, index);
            const Run run = copy.runs[index];
            const uint64_t shift = run.target & (WIDEST_BYTES - 1);
            const uint64_t at = (tile - run.first_tile) * TILE_BYTES<Block>;
            const uint64_t begin = at > shift ? at - shift : 0;
            const uint64_t until = at + TILE_BYTES<Block> - shift;
            const uint64_t end = until < run.num_bytes ? until : run.num_bytes;
            const uint64_t differing = (run.source ^ run.target) | WIDEST_BYTES;
            with_vector(static_cast<uint32_t>(differing & -differing), [&](auto vector) {
                copy_run<decltype(vector), Block>(
                    run.source + begin, run.target + begin, static_cast<uint32_t>(end - begin), thread);
            });
        }
    });
}

}  // namespace kvferry
