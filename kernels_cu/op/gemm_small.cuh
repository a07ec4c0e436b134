// Matrix products of few rows: what counts is how fast the rows of B come from memory.
//
// B goes from memory straight into registers, and there to 16 bits: a lane takes 16 bytes of a row of B, a quad 64, and
// the values of a lane are its part of the k of several MMAs; A passes through the same permutation of k. The depth is
// cut into eight runs, one for each warp of a block, whatever M, N and the machine are; they are added in a fixed tree.
// So a row's bits depend on K and the formats alone.
#pragma once

#include <cstdint>

#include "gemm.cuh"

namespace op {

constexpr int few_warps = 8, few_cols = 32;   // runs of the depth; columns of a block

// Scales of some consecutive values.
template <class Format>
constexpr int scales_of(int values) {
    if constexpr (Format::bits == 16) return 0;
    else return ceil_div(values, Format::block);
}

// What a lane takes of a row in one step: `values` consecutive ones, as they are in memory.
template <class Format, int values>
struct LaneRun {
    static constexpr int words = values * Format::bits / 32, chunks = words / 4;
    static constexpr int scales = scales_of<Format>(values);
    uint32_t word[words];
    uint32_t scale[scales > 0 ? scales : 1];
};

// One row of an operand, at this lane's place of a step.
template <class Format, int values>
struct LaneRow {
    using Run = LaneRun<Format, values>;
    const uint8_t *codes, *scales = nullptr;
    int64_t row;   // of the scales

    __device__ LaneRow(const OperandRows &rows, int matrix, int64_t index) {
        codes = rows.data + matrix * rows.batch + index * rows.stride;
    }
    __device__ LaneRow(const BlockRows &rows, int matrix, int64_t index)
        : LaneRow(static_cast<const OperandRows &>(rows), matrix, index) {
        row = rows.first_row + matrix * rows.scale_rows + index;
        scales = rows.scales;
    }
};

template <class Format, int values>
__device__ inline void load_run(LaneRun<Format, values> &run, const LaneRow<Format, values> &row,
                                const OperandRows &rows, int first,
                                bool there) {
    using Run = LaneRun<Format, values>;
    const int at = first * Format::bits / 8;
#pragma unroll
    for (int i = 0; i < Run::chunks; ++i) {
        const bool here = there && at + 16 * i < rows.bytes;
        const uint4 chunk = here ? __ldg(reinterpret_cast<const uint4 *>(row.codes + at) + i) : uint4{};
        run.word[4 * i] = chunk.x, run.word[4 * i + 1] = chunk.y, run.word[4 * i + 2] = chunk.z,
            run.word[4 * i + 3] = chunk.w;
    }
}
template <class Format, int values>
__device__ inline void load_scales(LaneRun<Format, values> &, const LaneRow<Format, values> &, const OperandRows &,
                                   int, bool) {}
template <class Format, int values>
__device__ inline void load_scales(LaneRun<Format, values> &run, const LaneRow<Format, values> &row,
                                   const BlockRows &rows, int first,
                                   bool there) {
#pragma unroll
    for (int i = 0; i < LaneRun<Format, values>::scales; ++i) {
        const int block = first / Format::block + i;
        run.scale[i] = there && block < rows.places.blocks ? __ldg(row.scales + rows.places.at(row.row, block)) : 0;
    }
}

// Eight values of a run, from 8 `part` on, as pairs of 16 bits.
template <class To, class Format, int values>
__device__ inline void pairs_of(const LaneRun<Format, values> &run, int part, uint32_t (&pairs)[4]) {
    if constexpr (Format::bits == 16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = run.word[4 * part + i];
    } else {
        const uint32_t scale = To::Scale::scale(run.scale[8 * part / Format::block]);
        constexpr int of_word = 16 / Format::bits;
#pragma unroll
        for (int i = 0; i < 4 / of_word; ++i) {
            uint32_t some[of_word];
            tile::Expansion<Format>::decode(some, run.word[part * (4 / of_word) + i]);
#pragma unroll
            for (int j = 0; j < of_word; ++j) pairs[i * of_word + j] = To::Scale::scaled(some[j], scale);
        }
    }
}

template <int slices>
struct FewShared {
    tile::AccumulatorStaging<few_cols> staging[few_warps][slices];
};

// C of 16 `slices` rows and 32 columns.
template <class FormatA, class FormatB, int slices, class RowsA, class RowsB>
__device__ inline void gemm_of_few_rows(FewShared<slices> &shared, const RowsA &a, const RowsB &b,
                                        const GemmOptions &options) {
    using To = Expanded<FormatA, FormatB>;
    constexpr int unit = 512 / FormatB::bits, values = unit / 4, tiles = few_cols / 8;
    const TilePlace place = TilePlace::of_block<16 * slices, few_cols>(options);
    if (!place.there) return;
    const int lane = ptx::laneid(), group = lane / 4, thread = lane % 4, warp = threadIdx.x / 32;

    const auto row_b = [&](int i) {
        return LaneRow<FormatB, values>(b, place.group, min(place.first_col + 8 * i + group, options.cols - 1));
    };
    const int units = ceil_div(b.bytes * 8 / FormatB::bits, unit), of_warp = ceil_div(units, few_warps);
    const int begin = warp * of_warp, end = min(begin + of_warp, units);

    tile::Accumulator sums[slices][tiles] = {};
    LaneRun<FormatB, values> next[tiles];
    auto load_b = [&](int step) {
#pragma unroll
        for (int i = 0; i < tiles; ++i) {
            const auto row = row_b(i);
            const int first = step * unit + thread * values;
            load_run(next[i], row, b, first, step < end);
            load_scales(next[i], row, b, first, step < end);
        }
    };
    load_b(begin);
#pragma unroll 1
    for (int step = begin; step < end; ++step) {
        LaneRun<FormatB, values> of_b[tiles];
#pragma unroll
        for (int i = 0; i < tiles; ++i) of_b[i] = next[i];
        load_b(step + 1);   // on its way while this one is multiplied
        const int first = step * unit + thread * values;
        // A by 8 values where many rows would not fit into registers, else all of the step at once.
        constexpr int some = slices > 1 && FormatA::bits == 16 ? 8 : values;
#pragma unroll
        for (int from = 0; from < values; from += some) {
            LaneRun<FormatA, some> of_a[2 * slices];
#pragma unroll
            for (int i = 0; i < 2 * slices; ++i) {
                const LaneRow<FormatA, some> row(a, place.matrix, row_of_a(options, place, group + 8 * i));
                const bool there = place.first_row + group + 8 * i < place.end_row;
                load_run(of_a[i], row, a, first + from, there);
                load_scales(of_a[i], row, a, first + from, there);
            }
#pragma unroll
            for (int part = 0; part < some / 8; ++part) {
                uint32_t pairs_b[tiles][4];
#pragma unroll
                for (int i = 0; i < tiles; ++i) pairs_of<To>(of_b[i], from / 8 + part, pairs_b[i]);
#pragma unroll
                for (int slice = 0; slice < slices; ++slice) {
                    uint32_t upper[4], lower[4];
                    pairs_of<To>(of_a[2 * slice], part, upper);
                    pairs_of<To>(of_a[2 * slice + 1], part, lower);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const tile::FragmentA fragment_a = {upper[2 * half], lower[2 * half], upper[2 * half + 1],
                                                            lower[2 * half + 1]};
#pragma unroll
                        for (int i = 0; i < tiles; ++i) {
                            const tile::FragmentB fragment_b = {pairs_b[i][2 * half], pairs_b[i][2 * half + 1]};
                            tile::multiply(sums[slice][i], fragment_a, fragment_b, typename To::Element{});
                        }
                    }
                }
            }
        }
    }
#pragma unroll
    for (int slice = 0; slice < slices; ++slice) shared.staging[warp][slice].put(sums[slice]);
    ptx::bar_sync();   // the sums of all runs are there
    using Staging = tile::AccumulatorStaging<few_cols>;
    for (int i = threadIdx.x; i < slices * 16 * few_cols; i += 32 * few_warps) {
        const int slice = i / (16 * few_cols), at = Staging::place(i / few_cols % 16, i % few_cols);
        float run[few_warps];
#pragma unroll
        for (int j = 0; j < few_warps; ++j) run[j] = shared.staging[j][slice].words[at];
#pragma unroll
        for (int width = 1; width < few_warps; width *= 2)
#pragma unroll
            for (int j = 0; j < few_warps; j += 2 * width) run[j] += run[j + width];
        shared.staging[0][slice].words[at] = run[0];
    }
    ptx::bar_sync();   // they are added
    const Epilogue epilogue(options.epilogue, place.matrix, place.group, options.rows, options.cols);
    if (warp < slices) epilogue.finish(shared.staging[0][warp], place.first_row + 16 * warp, place.end_row,
                                       place.first_col);
    epilogue.fill_tile(place.first_row + 16 * slices >= options.rows, place.first_col, few_cols);
}

}  // namespace op

// An entry for few rows.
#define FEW_GEMM(name, FormatA, FormatB, slices_) \
    KERNEL(name, .threads = {32 * op::few_warps}, .shared_bytes = sizeof(op::FewShared<slices_>), \
           .tile = {op::few_cols, 16 * slices_, 1}, .min_blocks = slices_ == 1 ? 2 : 1)
#define FEW_BLOCK_GEMM(name, FormatA, FormatB, slices_) \
    FEW_GEMM(name, FormatA, FormatB, slices_) BLOCK_PARAMETERS { \
        op::gemm_of_few_rows<FormatA, FormatB, slices_>(shared<op::FewShared<slices_>>(), BLOCK_ROWS(a, a_batch), \
                                                        BLOCK_ROWS(b, b_group), GEMM_OPTIONS(a_global, b_global)); \
    }
#define FEW_HALF_GEMM(name, FormatB, slices_) \
    FEW_GEMM(name, tile::Bf16, FormatB, slices_) HALF_PARAMETERS { \
        op::gemm_of_few_rows<tile::Bf16, FormatB, slices_>(shared<op::FewShared<slices_>>(), HALF_ROWS(a, a_batch), \
                                                           BLOCK_ROWS(b, b_group), GEMM_OPTIONS(nullptr, b_global)); \
    }
