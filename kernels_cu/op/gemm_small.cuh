// Matrix products of few rows: what counts is how fast the rows of B come from memory.
//
// The depth is cut into eight runs, one for each warp of a block, whatever M, N and the machine are; they are added in
// a fixed tree. So a row's bits depend on K and the formats alone. A warp keeps several stages of B on their way from
// memory: a lane takes 16 bytes of a row, a quad 64, and reads from shared memory what it copied itself, so that no
// warp waits for another. The values of a lane are its part of the k of several MMAs in 16 bits; A passes through the
// same permutation of k. A is read by every block, so it comes from the caches, into registers, a stage ahead.
#pragma once

#include <cstdint>

#include "gemm.cuh"

namespace op {

constexpr int few_warps = 8, few_rows = 16, few_cols = 32;   // runs of the depth; rows and columns of a block
constexpr int few_blocks = 2;                                // of a multiprocessor

// Values that share a scale: where there are no scales more than a lane ever has.
template <class Format>
constexpr int values_of_scale = 1 << 16;
template <class Format>
    requires(Format::bits < 16)
constexpr int values_of_scale<Format> = Format::block;

// Scales of some consecutive values.
template <class Format, int values>
constexpr int scales_of_run = Format::bits == 16 ? 0 : ceil_div(values, values_of_scale<Format>);

// What a warp has of its run of B on the way: 64 bytes of 32 rows to a stage, and words of scales, which serve 128
// values of a row.
template <class Format>
struct FewRing {
    static constexpr int tiles = few_cols / 8, words = slice_words<Format>;
    static constexpr int values = 512 / Format::bits;            // of a row in a stage
    static constexpr int parts = words > 0 ? 128 / values : 1;   // stages to words of scales
    static constexpr int chunk_bytes = 32 * tiles * 16, scale_bytes = 4 * few_cols * words;
    static constexpr int budget = ptx::shared_bytes_per_block / few_blocks / few_warps - 128;
    static constexpr int fits(int stages) {
        return stages * chunk_bytes + (ceil_div(stages, parts) + 1) * scale_bytes <= budget;
    }
    static constexpr int stages = fits(4) ? 4 : fits(3) ? 3 : 2, scale_stages = ceil_div(stages, parts) + 1;
    static_assert(fits(stages));
    struct NoWords {};
    using Words = ScaleWords<few_cols, (words > 0 ? words : 1)>;

    uint4 chunks[stages][tiles][32];   // of lanes
    std::conditional_t<(words > 0), Words, NoWords> scales[scale_stages];
};

template <class FormatB>
struct FewShared {
    union Warp {
        FewRing<FormatB> ring;
        tile::AccumulatorStaging<few_cols> staging;
    };
    Warp warp[few_warps];
};

// A lane's part of two rows of A, those of its quad in a fragment: of each stage `values` values, in chunks of 16
// bytes. Chunks are loaded two ahead (where a stage has one, one ahead), scales a stage ahead.
template <class Format, int values, int stage_values>
struct FewRowsOfA {
    static constexpr int chunk_values = 128 / Format::bits, chunks = values / chunk_values;
    static constexpr int held = chunks < 2 ? chunks : 2;
    static constexpr int stage_bytes = stage_values * Format::bits / 8, parts_of_chunk = chunk_values / 8;
    static_assert(values % chunk_values == 0 && chunks % held == 0);
    static constexpr int scale_count = scales_of_run<Format, values>;
    const uint8_t *codes[2], *scales[2] = {};
    int left, blocks = 0, block = 0;   // bytes from this stage's first chunk on; scales of a row; the next one to load
    bool there[2], swizzled = false;
    uint32_t word[2][4 * held];
    uint32_t scale[2][scale_count > 0 ? scale_count : 1], next_scale[2][scale_count > 0 ? scale_count : 1];

    // From value `first` on.
    __device__ FewRowsOfA(const OperandRows &rows, const GemmOptions &options, const TilePlace &place, int first) {
        const int64_t at = (first + ptx::laneid() % 4 * values) * Format::bits / 8;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = ptx::laneid() / 4 + 8 * i;
            codes[i] = rows.data + place.matrix * rows.batch + row_of_a(options, place, row) * rows.stride + at;
            there[i] = place.first_row + row < place.end_row;
        }
        left = rows.bytes - int(at);
    }
    __device__ FewRowsOfA(const BlockRows &rows, const GemmOptions &options, const TilePlace &place, int first)
        : FewRowsOfA(static_cast<const OperandRows &>(rows), options, place, first) {
        block = (first + ptx::laneid() % 4 * values) / Format::block, blocks = rows.places.blocks;
        swizzled = rows.places.swizzled;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int64_t row = row_of_a(options, place, ptx::laneid() / 4 + 8 * i);
            scales[i] = rows.scales + rows.places.at(rows.first_row + place.matrix * rows.scale_rows + row, 0);
        }
    }

    // Loads chunk `i`, counted from this stage's first one, over the one that is `held` before.
    __device__ void load_chunk(int i) {
        const int at = i / chunks * stage_bytes + 16 * (i % chunks), first = 4 * (i % held);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const bool here = there[row] && left > at;
            const uint4 chunk = here ? __ldg(reinterpret_cast<const uint4 *>(codes[row] + at)) : uint4{};
            word[row][first] = chunk.x, word[row][first + 1] = chunk.y;
            word[row][first + 2] = chunk.z, word[row][first + 3] = chunk.w;
        }
    }
    // Loads the scales of the next stage, which step() makes those of this one.
    __device__ void load_scales() {
#pragma unroll
        for (int j = 0; j < scale_count; ++j) {
            const int at = block + j, place = swizzled ? at / 4 * tile::scale_tile_bytes + at % 4 : at;
#pragma unroll
            for (int row = 0; row < 2; ++row)
                next_scale[row][j] = there[row] && at < blocks ? __ldg(scales[row] + place) : 0;
        }
        if constexpr (scale_count > 0) block += stage_values / Format::block;
    }
    __device__ void take_scales() {
#pragma unroll
        for (int j = 0; j < scale_count; ++j)
#pragma unroll
            for (int row = 0; row < 2; ++row) scale[row][j] = next_scale[row][j];
    }
    __device__ void step() {
        codes[0] += stage_bytes, codes[1] += stage_bytes, left -= stage_bytes;
        take_scales();
    }
};

// A lane's part of the rows of B of one warp, on their way into its ring.
template <class Format>
struct FewRowsOfB {
    using Ring = FewRing<Format>;
    const uint8_t *source;
    int64_t step;
    uint32_t target;
    int left, there;   // bytes of the run from this lane's next chunk on; of its rows, those that exist

    __device__ FewRowsOfB(Ring &ring, const OperandRows &rows, const GemmOptions &options, const TilePlace &place,
                          int begin, int end) {
        const int lane = ptx::laneid(), row = place.first_col + lane / 4, at = 64 * begin + 16 * (lane % 4);
        source = rows.data + place.group * rows.batch + row * rows.stride + at;
        step = 8 * rows.stride;
        target = static_cast<uint32_t>(__cvta_generic_to_shared(&ring.chunks[0][0][lane]));
        left = min(rows.bytes, 64 * end) - at;
        there = ceil_div(max(options.cols - row, 0), 8);
    }

    // Starts copying the next stage into its place in the ring.
    __device__ void copy(int stage) {
#pragma unroll
        for (int i = 0; i < Ring::tiles; ++i)
            ptx::cp_async_cg_16(target + stage * Ring::chunk_bytes + 512 * i, source + i * step, left > 0 && i < there);
        source += 64, left -= 64;
    }
};

// Eight values of a run, from 8 `part` on, as pairs of 16 bits; `scale` is their scale as such a pair.
template <class To, class Format, int words>
__device__ inline void pairs_of(const uint32_t (&word)[words], int part, uint32_t (&pairs)[4], uint32_t scale) {
    if constexpr (Format::bits == 16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = word[4 * part + i];
    } else {
        constexpr int of_word = 16 / Format::bits;
#pragma unroll
        for (int i = 0; i < 4 / of_word; ++i) {
            uint32_t some[of_word];
            To::Scale::template decode<Format>(some, word[part * (4 / of_word) + i]);
#pragma unroll
            for (int j = 0; j < of_word; ++j) pairs[i * of_word + j] = To::Scale::scaled(some[j], scale);
        }
    }
}

// C of 16 rows and 32 columns.
template <class FormatA, class FormatB, class RowsA, class RowsB>
__device__ inline void gemm_of_few_rows(FewShared<FormatB> &shared, const RowsA &a, const RowsB &b,
                                        const GemmOptions &options) {
    using To = Expanded<FormatA, FormatB>;
    using Ring = FewRing<FormatB>;
    constexpr int values = Ring::values / 4, tiles = Ring::tiles;   // of a lane in a stage; of columns
    const TilePlace place = TilePlace::of_block<few_rows, few_cols>(options);
    if (place.fills) fill_scale_tiles(options.epilogue, options.rows, place.first_col, few_cols);
    if (!place.there) return;
    const int lane = ptx::laneid(), group = lane / 4, thread = lane % 4, warp = threadIdx.x / 32;
    Ring &ring = shared.warp[warp].ring;

    // Runs are whole units of words of scales.
    const int units = ceil_div(b.bytes, 64 * Ring::parts), all = units * Ring::parts;
    const int of_warp = ceil_div(units, few_warps) * Ring::parts;
    const int begin = min(warp * of_warp, all), end = min(begin + of_warp, all);
    FewRowsOfB<FormatB> rows_b(ring, b, options, place, begin, end);
    FewRowsOfA<FormatA, values, Ring::values> rows_a(a, options, place, begin * Ring::values);
    const auto row_b = [&](int row) { return min(place.first_col + row, options.cols - 1); };
    auto scales_b = [&] {
        if constexpr (Ring::words > 0) {
            ScaleCopies<few_cols, Ring::words, 32> copies(ring.scales[0], b, place.group, lane, row_b);
            copies.skip(begin / Ring::parts);
            return copies;
        } else {
            return NoScales{};
        }
    }();
    int stage = 0, scale_stage = 0, filled_scales = 0;
    auto copy = [&](int step, bool first_part) {   // of all stages in order; the groups of those past the end are empty
        if (step < end) {
            rows_b.copy(stage);
            if (first_part) {
                scales_b.start(filled_scales * Ring::scale_bytes), scales_b.finish(filled_scales * Ring::scale_bytes);
                filled_scales = filled_scales + 1 == Ring::scale_stages ? 0 : filled_scales + 1;
            }
        }
        ptx::cp_async_commit_group();
        stage = stage + 1 == Ring::stages ? 0 : stage + 1;
    };
#pragma unroll
    for (int i = 0; i < Ring::stages; ++i) copy(begin + i, i % Ring::parts == 0);
    rows_a.load_scales();
#pragma unroll
    for (int i = 0; i < rows_a.held; ++i) rows_a.load_chunk(i);
    rows_a.take_scales();

    tile::Accumulator sums[tiles] = {};
#pragma unroll 1
    for (int unit = begin; unit < end; unit += Ring::parts) {
#pragma unroll
        for (int part_of_unit = 0; part_of_unit < Ring::parts; ++part_of_unit) {
            ptx::cp_async_wait_group<Ring::stages - 1>();
            ptx::bar_warp_sync();   // this stage is there for all lanes; all have read the scales before it
            uint32_t words_b[tiles][4], scale_b[tiles] = {};
#pragma unroll
            for (int i = 0; i < tiles; ++i) {
                const uint4 chunk = ring.chunks[stage][i][lane];
                words_b[i][0] = chunk.x, words_b[i][1] = chunk.y, words_b[i][2] = chunk.z, words_b[i][3] = chunk.w;
            }
            copy(unit + part_of_unit + Ring::stages, (part_of_unit + Ring::stages) % Ring::parts == 0);
            rows_a.load_scales();
            uint32_t scale_a[2][scales_of_run<FormatA, values> + 1] = {};
            if constexpr (FormatA::bits < 16) {
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int j = 0; j < rows_a.scale_count; ++j) scale_a[i][j] = To::Scale::scale(rows_a.scale[i][j]);
            }
#pragma unroll
            for (int part = 0; part < values / 8; ++part) {
                uint32_t pairs_b[tiles][4], pairs_a[2][4];
                if constexpr (Ring::words > 0) {
                    const int block = (part_of_unit * Ring::values + thread * values + 8 * part) / FormatB::block;
#pragma unroll
                    for (int i = 0; i < tiles; ++i)
                        if (8 * part % FormatB::block == 0)
                            scale_b[i] = To::Scale::scale(ring.scales[scale_stage].byte(8 * i + group, block));
                }
#pragma unroll
                for (int i = 0; i < tiles; ++i) pairs_of<To, FormatB>(words_b[i], part, pairs_b[i], scale_b[i]);
                const int chunk = part / rows_a.parts_of_chunk, place_of_chunk = chunk % rows_a.held;
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    pairs_of<To, FormatA>(rows_a.word[i],
                                          place_of_chunk * rows_a.parts_of_chunk + part % rows_a.parts_of_chunk,
                                          pairs_a[i], scale_a[i][8 * part / values_of_scale<FormatA>]);
                if ((part + 1) % rows_a.parts_of_chunk == 0) rows_a.load_chunk(chunk + rows_a.held);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const tile::FragmentA fragment_a = {pairs_a[0][2 * half], pairs_a[1][2 * half],
                                                        pairs_a[0][2 * half + 1], pairs_a[1][2 * half + 1]};
#pragma unroll
                    for (int i = 0; i < tiles; ++i) {
                        const tile::FragmentB fragment_b = {pairs_b[i][2 * half], pairs_b[i][2 * half + 1]};
                        tile::multiply(sums[i], fragment_a, fragment_b, typename To::Element{});
                    }
                }
            }
            rows_a.step();
        }
        if constexpr (Ring::words > 0) scale_stage = scale_stage + 1 == Ring::scale_stages ? 0 : scale_stage + 1;
    }
    ptx::cp_async_wait_group<0>();
    shared.warp[warp].staging.put(sums);
    ptx::bar_sync();   // the sums of all runs are there
    using Staging = tile::AccumulatorStaging<few_cols>;
    for (int i = threadIdx.x; i < few_rows * few_cols; i += 32 * few_warps) {
        const int at = Staging::place(i / few_cols, i % few_cols);
        float run[few_warps];
#pragma unroll
        for (int j = 0; j < few_warps; ++j) run[j] = shared.warp[j].staging.words[at];
#pragma unroll
        for (int width = 1; width < few_warps; width *= 2)
#pragma unroll
            for (int j = 0; j < few_warps; j += 2 * width) run[j] += run[j + width];
        shared.warp[0].staging.words[at] = run[0];
    }
    ptx::bar_sync();   // they are added
    const Epilogue epilogue(options.epilogue, place.matrix, place.group, options.rows, options.cols);
    if (warp == 0) epilogue.finish(shared.warp[0].staging, place.first_row, place.end_row, place.first_col);
}

}   // namespace op

// An entry for few rows.
#define FEW_GEMM(name, FormatB)                                                                                        \
    KERNEL(name, .threads = {32 * op::few_warps}, .shared_bytes = sizeof(op::FewShared<FormatB>),                      \
           .tile = {op::few_cols, op::few_rows, 1}, .min_blocks = op::few_blocks)
#define FEW_BLOCK_GEMM(name, FormatA, FormatB)                                                                         \
    FEW_GEMM(name, FormatB) BLOCK_PARAMETERS {                                                                         \
        op::gemm_of_few_rows<FormatA, FormatB>(shared<op::FewShared<FormatB>>(), BLOCK_ROWS(a, a_batch),               \
                                               BLOCK_ROWS(b, b_group), GEMM_OPTIONS(a_global, b_global));              \
    }
#define FEW_HALF_GEMM(name, FormatB)                                                                                   \
    FEW_GEMM(name, FormatB) HALF_PARAMETERS {                                                                          \
        op::gemm_of_few_rows<tile::Bf16, FormatB>(shared<op::FewShared<FormatB>>(), HALF_ROWS(a, a_batch),             \
                                                  BLOCK_ROWS(b, b_group), GEMM_OPTIONS(nullptr, b_global));            \
    }
