// Records: what the host writes down for a kernel. They are padded by nothing, and every address is one
// that the device reads and writes.
#pragma once

#include "block.cuh"

namespace kvferry {

// A number to divide by, at most 2^30: `number / value` is a product and a shift for numbers below 2^31.
struct Divisor {
    uint32_t value;
    uint32_t multiplier;
    uint32_t shift;

    KVFERRY_INLINE uint32_t divide(uint32_t number) const {
        return static_cast<uint32_t>(static_cast<uint64_t>(number) * multiplier >> shift);
    }
};

// One loop dimension, with its strides in bytes.
struct Step {
    Divisor count;
    uint32_t padding;
    uint64_t source_stride;
    uint64_t target_stride;
};

constexpr uint32_t MAX_DIMS = 4;

// A contiguous run, and the dimensions that repeat it, outermost first.
struct Strided {
    Divisor run_vectors;
    // Outer dimensions that do not loop.
    uint32_t unused_dims;
    Step dims[MAX_DIMS];
};

// Byte offsets of one piece of a block.
struct Entry {
    uint64_t source;
    uint64_t target;
};

// A strided copy at every entry of a slice of a table, as a sequence of vectors cut into tiles.
struct Loop {
    uint64_t source;
    uint64_t target;
    uint64_t first_entry;
    uint64_t first_tile;
    uint64_t num_vectors;
    uint32_t vector_bytes;
    Divisor entry_runs;
    Strided strided;
};

// A contiguous copy of any length and alignment.
struct Run {
    uint64_t source;
    uint64_t target;
    uint64_t num_bytes;
    uint64_t first_tile;
};

// Steps that lead from one matrix of a row to the next.
constexpr uint32_t MATRIX_STEPS = 4;

struct MatrixStep {
    uint64_t count;
    uint64_t stride;
};

// Matrices that are transposed in place: read into a scratch in the order of their places, and written
// where they belong.
struct Transposition {
    uint64_t address;
    uint64_t num_matrices;
    MatrixStep steps[MATRIX_STEPS];
    uint32_t matrix_vectors;
    uint32_t vector_bytes;
    Strided gather;
    Strided scatter;
};

// The host writes these by the same offsets.
static_assert(sizeof(Divisor) == 12 && sizeof(Step) == 32 && sizeof(Strided) == 144);
static_assert(sizeof(Entry) == 16 && sizeof(Loop) == 200 && sizeof(Run) == 32);
static_assert(sizeof(Transposition) == 376);

struct Offsets {
    uint64_t source;
    uint64_t target;
};

// Offsets of the run of this index.
KVFERRY_INLINE Offsets run_offsets(const Strided& strided, uint32_t run) {
    Offsets offsets = {0, 0};
    KVFERRY_ROLLED
    for (uint32_t outer = MAX_DIMS; outer > strided.unused_dims; --outer) {
        const Step& dim = strided.dims[outer - 1];
        const uint32_t above = dim.count.divide(run);
        const uint64_t step = run - above * dim.count.value;
        offsets.source += step * dim.source_stride;
        offsets.target += step * dim.target_stride;
        run = above;
    }
    return offsets;
}

// The last of some records that begin at `tile` or before, `from` or a later one.
template <class Record>
KVFERRY_INLINE uint32_t find_tile(const Record* records, uint32_t num_records, uint64_t tile, uint32_t from) {
    uint32_t begin = from;
    uint32_t end = num_records;
    if (begin + 1 == end || records[begin + 1].first_tile > tile) {
        return begin;
    }
    while (end - begin > 1) {
        const uint32_t middle = begin + (end - begin) / 2;
        const bool is_later = records[middle].first_tile > tile;
        begin = is_later ? begin : middle;
        end = is_later ? middle : end;
    }
    return begin;
}

}  // namespace kvferry
