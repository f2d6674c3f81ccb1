// In-place transpositions of matrices that fit in a block's shared memory: one read and one write a byte.
#pragma once

#include "records.cuh"

namespace kvferry {

struct Transpose {
    const Transposition* transposition;
    const uint64_t* rows;
};

// The address of a matrix: its row, and its steps within the row, the last one fastest.
KVFERRY_INLINE uint64_t matrix_address(const Transpose& transpose, uint64_t matrix) {
    const Transposition& how = *transpose.transposition;
    uint64_t address = how.address;
    KVFERRY_UNROLL
    for (uint32_t outer = MATRIX_STEPS; outer > 0; --outer) {
        const MatrixStep step = how.steps[outer - 1];
        const uint64_t above = matrix / step.count;
        address += (matrix - above * step.count) * step.stride;
        matrix = above;
    }
    return address + transpose.rows[matrix];
}

KVFERRY_INLINE Offsets vector_offsets(const Strided& strided, uint32_t vector, uint32_t vector_bytes) {
    const uint32_t run = strided.run_vectors.divide(vector);
    const uint64_t offset = static_cast<uint64_t>(vector - run * strided.run_vectors.value) * vector_bytes;
    const Offsets at = run_offsets(strided, run);
    return {at.source + offset, at.target + offset};
}

// A thread's part of moving a matrix one way, `read` and `write` being given what lies in a `Strided`.
template <class Vector, class Block, class Read, class Write>
KVFERRY_INLINE void move_matrix(const Strided& strided, uint32_t num_vectors, uint32_t thread, Read read, Write write) {
    for (uint32_t first = thread; first < num_vectors; first += UNROLL * Block::THREADS) {
        Vector held[UNROLL] = {};
        uint64_t targets[UNROLL] = {};
        KVFERRY_UNROLL
        for (uint32_t turn = 0; turn < UNROLL; ++turn) {
            const uint32_t vector = first + turn * Block::THREADS;
            if (vector < num_vectors) {
                const Offsets at = vector_offsets(strided, vector, sizeof(Vector));
                held[turn] = read(at.source);
                targets[turn] = at.target;
            }
        }
        KVFERRY_UNROLL
        for (uint32_t turn = 0; turn < UNROLL; ++turn) {
            if (first + turn * Block::THREADS < num_vectors) {
                write(targets[turn], held[turn]);
            }
        }
    }
}

// Transposes every matrix that is this block's turn. `scratch` is shared by its threads and holds one.
template <class Block>
KVFERRY_INLINE void transpose(const Block& block, const Transpose& transpose, Bytes16* scratch) {
    const Transposition& how = *transpose.transposition;
    char* packed = reinterpret_cast<char*>(scratch);
    for (uint64_t matrix = block.index(); matrix < how.num_matrices; matrix += block.count()) {
        const uint64_t address = matrix_address(transpose, matrix);
        block.each_thread([&](uint32_t thread) {
            with_vector(how.vector_bytes, [&](auto vector) {
                using Vector = decltype(vector);
                move_matrix<Vector, Block>(
                    how.gather, how.matrix_vectors, thread,
                    [&](uint64_t at) { return Block::template read<Vector>(address + at); },
                    [&](uint64_t at, Vector held) { *reinterpret_cast<Vector*>(packed + at) = held; });
            });
        });
        block.each_thread([&](uint32_t thread) {
            with_vector(how.vector_bytes, [&](auto vector) {
                using Vector = decltype(vector);
                move_matrix<Vector, Block>(
                    how.scatter, how.matrix_vectors, thread,
                    [&](uint64_t at) { return *reinterpret_cast<const Vector*>(packed + at); },
                    [&](uint64_t at, Vector held) { Block::template write<Vector>(address + at, held); });
            });
        });
    }
}

}  // namespace kvferry
