// Strided copies over block tables: gather, scatter, re-layout, other block sizes, slices of heads.
//
// A loop is a sequence of vectors, cut into tiles of a fixed number. Blocks take tiles in turn, so that
// neighbours work on neighbouring memory. Where a tile's runs lie is worked out once a run, in the shadow
// of the tile before it.
#pragma once

#include "records.cuh"

namespace kvferry {

template <class Block>
constexpr uint32_t TILE_VECTORS = Block::THREADS * UNROLL;

// The runs that a tile touches.
template <class Block>
struct Tile {
    Divisor run_vectors;
    uint32_t vector_bytes;
    // Vectors of the first run that come before the tile.
    uint32_t begin;
    uint32_t num_vectors;
    // Addresses of the runs: no more than there are vectors.
    Offsets runs[TILE_VECTORS<Block>];
};

struct CopyLoops {
    const Loop* loops;
    const Entry* table;
    uint64_t num_tiles;
    uint32_t num_loops;
};

// A thread's part of working out where the runs of `index` lie; `loop` is that of an earlier tile.
template <class Block>
KVFERRY_INLINE void locate(const CopyLoops& copy, uint64_t index, uint32_t thread, uint32_t& loop, Tile<Block>& tile) {
    loop = find_tile(copy.loops, copy.num_loops, index, loop);
    const Loop& in = copy.loops[loop];
    const Divisor run_vectors = in.strided.run_vectors;
    const uint64_t first = (index - in.first_tile) * TILE_VECTORS<Block>;
    const uint64_t left = in.num_vectors - first;
    const uint32_t num_vectors = left < TILE_VECTORS<Block> ? static_cast<uint32_t>(left) : TILE_VECTORS<Block>;
    const uint64_t first_run = first / run_vectors.value;
    const uint32_t begin = static_cast<uint32_t>(first - first_run * run_vectors.value);
    const uint32_t num_runs = run_vectors.divide(begin + num_vectors - 1) + 1;
    if (thread == 0) {
        tile.run_vectors = run_vectors;
        tile.vector_bytes = in.vector_bytes;
        tile.begin = begin;
        tile.num_vectors = num_vectors;
    }
    if (thread >= num_runs) {
        return;
    }
    const uint64_t first_entry = first_run / in.entry_runs.value;
    const uint32_t before = static_cast<uint32_t>(first_run - first_entry * in.entry_runs.value);
    for (uint32_t run = thread; run < num_runs; run += Block::THREADS) {
        const uint32_t entries = in.entry_runs.divide(before + run);
        const Offsets offsets = run_offsets(in.strided, before + run - entries * in.entry_runs.value);
        const Entry entry = copy.table[in.first_entry + first_entry + entries];
        tile.runs[run] = {in.source + entry.source + offsets.source, in.target + entry.target + offsets.target};
    }
}

// Where a vector of a tile lies.
template <class Vector, class Block>
KVFERRY_INLINE Offsets vector_addresses(const Tile<Block>& tile, uint32_t vector) {
    const uint32_t at = tile.begin + vector;
    const uint32_t run = tile.run_vectors.divide(at);
    const uint64_t offset = static_cast<uint64_t>(at - run * tile.run_vectors.value) * sizeof(Vector);
    return {tile.runs[run].source + offset, tile.runs[run].target + offset};
}

// A thread's part of copying a tile; `meanwhile` runs between its reads and its writes. Targets are worked
// out anew after it, since registers are scarcer than instructions.
template <class Vector, class Block, class Meanwhile>
KVFERRY_INLINE void copy_tile(const Tile<Block>& tile, uint32_t thread, Meanwhile meanwhile) {
    Vector held[UNROLL] = {};
    KVFERRY_UNROLL
    for (uint32_t turn = 0; turn < UNROLL; ++turn) {
        const uint32_t vector = thread + turn * Block::THREADS;
        if (vector < tile.num_vectors) {
            held[turn] = Block::template read<Vector>(vector_addresses<Vector>(tile, vector).source);
        }
    }
    meanwhile();
    KVFERRY_UNROLL
    for (uint32_t turn = 0; turn < UNROLL; ++turn) {
        const uint32_t vector = thread + turn * Block::THREADS;
        if (vector < tile.num_vectors) {
            Block::template write<Vector>(vector_addresses<Vector>(tile, vector).target, held[turn]);
        }
    }
}

// Copies every tile that is this block's turn. `tiles` is shared by its threads.
template <class Block>
KVFERRY_INLINE void copy_loops(const Block& block, const CopyLoops& copy, Tile<Block> (&tiles)[2]) {
    uint32_t loop = 0;
    uint64_t index = block.index();
    if (index < copy.num_tiles) {
        block.each_thread([&](uint32_t thread) { locate(copy, index, thread, loop, tiles[0]); });
    }
    for (uint32_t turn = 0; index < copy.num_tiles; turn ^= 1) {
        const uint64_t next = index + block.count();
        block.each_thread([&](uint32_t thread) {
            const Tile<Block>& tile = tiles[turn];
            with_vector(tile.vector_bytes, [&](auto vector) {
                copy_tile<decltype(vector)>(tile, thread, [&] {
                    if (next < copy.num_tiles) {
                        locate(copy, next, thread, loop, tiles[turn ^ 1]);
                    }
                });
            });
        });
        index = next;
    }
}

}  // namespace kvferry
