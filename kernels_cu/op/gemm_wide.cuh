// Matrix products with 17 to 64 rows, with the sums and the bits of gemm_small.cuh. MMAs and conversions of codes then
// take longer than the load of B. C holds floats, without an activation or with a gate.
//
// A block has 64 columns. Each warp computes all rows and columns of the block over its own run of the depth. So a code
// of A is expanded once for 64 columns and a code of B once for all rows. Both operands and their scales come through
// rings in shared memory. On machines with too little shared memory these entries compile the code of
// gemm_small.cuh.
#pragma once

#include <cstdint>

#include "gemm_small.cuh"

namespace op {

constexpr int wide_rows = 64, wide_cols = 64, wide_halves = wide_cols / few_cols;

// What a warp has in shared memory, with `stages_` steps of A.
template <class FormatA, class FormatB, int stages_>
struct WideWarp {
    using Ring = FewRing<FormatB, wide_cols>;
    using RingOfA = FewRing<FormatA, wide_rows>;
    static constexpr int stages = stages_, fragments = wide_rows / 8;
    struct Rings {
        uint4 a[stages][fragments][32];   // a chunk of each lane
        std::conditional_t<RingOfA::scaled, typename RingOfA::Page[at_least_one(RingOfA::pages)], NoScaleCopies>
            scales_of_a;
        Ring b;   // last: nvcc places a member behind an empty one wrongly
    };
    union {
        Rings rings;
        tile::AccumulatorStaging<few_cols> staging[wide_halves * wide_rows / 16];   // of half a block's columns each
    };
};
template <class FormatA, class FormatB>
struct WideShared {
    static constexpr bool has_three = ptx::shared_bytes_per_block >= few_warps * sizeof(WideWarp<FormatA, FormatB, 3>);
    using Warp = WideWarp<FormatA, FormatB, has_three ? 3 : 2>;
    Warp warp[few_warps];
};
template <class FormatA, class FormatB>
constexpr bool has_wide_blocks = ptx::shared_bytes_per_block >= sizeof(WideShared<FormatA, FormatB>);

// Factors of a lane's scales in a step, as pairs: of one scale twice, or of two if the lane's values have two.
template <class Format, int values, bool in_halves>
struct WideScales {
    static constexpr int of_step = scales_of_run<Format, values>;
    static constexpr int stride = of_step > 1 ? 1 : 4 * values / values_of_scale<Format>;
    uint32_t offset, selector;

    // In step `step` of a unit.
    __device__ explicit WideScales(int step) {
        const int block = tile::StepShare<values>::first() / Format::block + step * of_step * stride;
        const uint32_t first = block % 4, second = of_step > 1 ? first + 1 : first;
        offset = 16 * tile::StepShare<values>::row() + 4 * (block / 4);
        selector = in_halves ? 0x4040 | first | second << 8 : 0x4400 | first | second << 4;
    }
    // Of all tiles of eight rows; `scales` is where the unit's scales of the first row begin.
    template <class Factors, int tiles>
    __device__ void load(uint32_t (&factors)[tiles], const uint8_t *scales, Factors &&factors_of) const {
#pragma unroll
        for (int i = 0; i < tiles; ++i) {
            const uint32_t word = *reinterpret_cast<const uint32_t *>(scales + (offset + 16 * 8 * i));
            factors[i] = factors_of(__byte_perm(word, 0, selector));
        }
    }
    // The factor of the eight values from 8 `part` on.
    __device__ static uint32_t of_part(uint32_t two, int part) {
        if constexpr (of_step > 1) return __byte_perm(two, 0, 8 * part < values_of_scale<Format> ? 0x1010 : 0x3232);
        else return two;
    }
};
template <class Runs>
__device__ inline uint32_t factors_of_a(uint32_t scales) {
    if constexpr (checks_scales<Runs>) return Runs::ScalesOfA::factors(scales);
    else return Runs::factors(scales);
}

// A lane's copies of scales of every 32nd of `rows` rows.
template <class Format, int rows>
struct WideScaleCopies {
    static constexpr int count = rows / 32;
    FewScaleCopies<Format> next;   // of the first of these rows
    const uint8_t *source[count];

    WideScaleCopies() = default;
    // Of rows of a matrix from `first_row` on, to row `last` at most; from unit `begin` to unit `end`.
    __device__ WideScaleCopies(uint8_t (&page)[rows][16], const BlockRows &operand, int matrix, int first_row, int last,
                               int begin, int end) {
        struct FirstRows {   // of the page, as FewScaleCopies takes them
            struct {
                struct {
                    uint8_t of_row[32][16];
                } page[1];
            } scales;
        };
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const int row = tile::lane_item(first_row + 32 * i);
            const FewScaleCopies<Format> of_row(reinterpret_cast<FirstRows &>(page), operand, matrix, min(row, last),
                                                begin, end);
            if (i == 0) next = of_row;
            // Not the last row again: all blocks would meet at it in the L2.
            source[i] = i > 0 && row > last ? source[i - 1] : of_row.source;
        }
    }

    // Starts copying the next page to the one at `offset`.
    __device__ void copy(uint32_t offset) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            FewScaleCopies<Format> of_row = next;
            of_row.source = source[i];
            of_row.copy(offset + 32 * i * 16);
            source[i] = of_row.source;
        }
        next.left -= 16, next.words -= 4;
    }
};

// The codes of eight values of a lane.
template <int bits>
__device__ inline void read_eight(uint32_t (&words)[bits / 4], const void *from) {
    if constexpr (bits == 16) {
        const uint4 all = *static_cast<const uint4 *>(from);
        words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    } else if constexpr (bits == 8) {
        const uint2 all = *static_cast<const uint2 *>(from);
        words[0] = all.x, words[1] = all.y;
    } else {
        words[0] = *static_cast<const uint32_t *>(from);
    }
}

// C of up to 64 rows and 64 columns.
template <class FormatA, class FormatB, class RowsA, class RowsB>
__device__ inline void gemm_of_wide_blocks(const RowsA &a, const RowsB &b, const GemmOptions &options) {
    using Shared = WideShared<FormatA, FormatB>;
    using Warp = typename Shared::Warp;
    using Ring = typename Warp::Ring;
    using RingOfA = typename Warp::RingOfA;
    constexpr auto order = FormatB::bits == 4 ? tile::PairOrder::crossed : tile::PairOrder::natural;
    constexpr int values = 128 / FormatA::bits, parts = values / 8, bytes = values * FormatB::bits / 8;
    constexpr int tiles = Ring::tiles, fragments = Warp::fragments, step_bytes = 64;                // of A
    constexpr int steps_of_unit = Ring::unit / (4 * values), steps = Ring::units * steps_of_unit;   // of a line
    static_assert(steps > 1, "a copied line has two steps to come");
    using Share = tile::StepShare<values>;
    auto &shared = ::shared<Shared>();
    const TilePlace place = TilePlace::of_block<wide_rows, wide_cols, false, true>(options);
    if (!place.there) return ptx::griddepcontrol_wait();
    const int warp = ptx::of_this_branch(threadIdx.x / 32);
    auto &rings = shared.warp[warp].rings;
    const int units = ceil_div(b.bytes, Ring::unit_bytes), of_warp = Ring::units_of_run(b.bytes);
    const int begin = min(warp * of_warp, units), end = min(begin + of_warp, units);
    const int rows = min(place.end_row - place.first_row, wide_rows);
    // Lines of B, and pages of scales.
    FewRowsOfB<FormatB, bytes, wide_cols> rows_b(rings.b, b, options, place, begin, end);
    std::conditional_t<Ring::scaled, WideScaleCopies<FormatB, wide_cols>, NoScaleCopies> scales_b;
    std::conditional_t<RingOfA::scaled, WideScaleCopies<FormatA, wide_rows>, NoScaleCopies> scales_a;
    if constexpr (Ring::scaled)
        scales_b = WideScaleCopies<FormatB, wide_cols>(rings.b.scales.page[0].of_row, b, place.group, place.first_col,
                                                       options.cols - 1, begin, end);
    if constexpr (RingOfA::scaled)
        scales_a = WideScaleCopies<FormatA, wide_rows>(rings.scales_of_a[0].of_row, a, place.matrix, place.first_row,
                                                       place.end_row - 1, begin, end);
    int filled = begin;
    uint32_t stage = 0, page = 0;   // where the next ones begin
    const auto copy_scales = [&] {
        if constexpr (Ring::scaled) {
            if (filled < end && (filled - begin) % Ring::page_units == 0) {
                scales_b.copy(page);
                if constexpr (RingOfA::scaled) scales_a.copy(page);
                page = next_in_ring(page, sizeof(typename Ring::Page), Ring::pages);
            }
        }
    };
    const auto next_line = [&] {
        filled += Ring::units;
        stage = next_in_ring(stage, sizeof(typename Ring::Stage), Ring::stages);
    };
    const auto copy_b = [&] {
        // A line that the L2 fetches with the next one delays others: it pays where memory is what binds.
        if (filled < end) rows_b.template copy<(FormatB::bits == 16)>(stage);
        copy_scales();
        next_line();
    };
    // Half of the first line: the loop needs the first half early.
    const auto copy_half = [&](int half) {
        using Lines = tile::SwizzledLines<bytes>;
        const int row = Share::row(), chunk = 4 * half + Share::quarter(), at = Ring::unit_bytes * begin + 16 * chunk;
        const uint8_t *const source = b.data + place.group * b.batch + (place.first_col + row) * b.stride + at;
        const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(rows_b.codes)) + Ring::line * row +
                                16 * (chunk ^ Lines::swizzle(row));
        const int left = min(b.bytes, Ring::unit_bytes * end) - at, there = options.cols - place.first_col - row;
#pragma unroll
        for (int i = 0; i < tiles; ++i) {
            const bool present = left > 0 && 8 * i < there;
            if constexpr (FormatB::bits < 16)
                ptx::cp_async_cg_16_once(target + 8 * Ring::line * i, source + 8 * i * b.stride, present);
            else ptx::cp_async_cg_16(target + 8 * Ring::line * i, source + 8 * i * b.stride, present);
        }
    };
    // Steps of A.
    const int at = begin * Ring::unit * FormatA::bits / 8 + 16 * Share::quarter();
    const uint8_t *from = a.data + place.matrix * a.batch + (place.first_row + Share::row()) * a.stride + at;
    int left = a.bytes - at;
    const int there = rows - Share::row();
    constexpr uint32_t stage_bytes = sizeof(rings.a[0]), fragment_bytes = sizeof(rings.a[0][0]);
    const uint8_t *const chunks = reinterpret_cast<const uint8_t *>(&tile::of_lane(rings.a[0][0]));
    const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(chunks));
    uint32_t filled_a = 0, read_a = 0;
    // Starts copying the next step. Rows past the end are zeros: all blocks would meet at the last one in the L2.
    const auto copy_a = [&] {
#pragma unroll
        for (int j = 0; j < fragments; ++j)
            ptx::cp_async_cg_16(target + filled_a + j * fragment_bytes, from + 8 * j * a.stride,
                                left > 0 && 8 * j < there);
        from += step_bytes, left -= step_bytes;
        filled_a = next_in_ring(filled_a, stage_bytes, Warp::stages);
    };
    ptx::griddepcontrol_wait();
    copy_scales(), copy_a(), copy_half(0), ptx::cp_async_commit_group();
    copy_half(1);
    if constexpr (Warp::stages > 2) copy_a();
    ptx::cp_async_commit_group();
    rows_b.source += Ring::line, rows_b.left -= Ring::line;
    next_line();

    tile::Accumulator sums[fragments][wide_halves][few_cols / 16] = {};
    uint32_t stage_read = 0, page_read = 0;
    int unit = begin;
    // Whether a scale of the next `words` words of a page does not suit f16.
    const auto any_outside = [&](uint32_t page, int words) {
        if constexpr (few_in_halves<FormatA, FormatB>) {
            using Half = tile::MxRunsToF16<FormatA, FormatB>;
            const uint32_t outside =
                outside_of_page<typename Half::ScalesOfA, wide_rows>(rings.scales_of_a[0].of_row[0] + page, words) |
                outside_of_page<typename Half::ScalesOfB, wide_cols>(rings.b.scales.page[0].of_row[0] + page, words);
            return ptx::vote_sync_any(outside);
        }
        return false;
    };
    const auto multiply_lines = [&](auto in_16_bits) {
        using Runs = decltype(in_16_bits);
        constexpr bool in_halves = checks_scales<Runs>;
        using Element = typename MmaElement<Runs, typename Expanded<FormatA, FormatB>::Element>::Type;
#pragma unroll 1
        for (; unit < end; unit += Ring::units) {
            [[maybe_unused]] const int unit_in_page = (unit - begin) % Ring::page_units;
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
                const int of_line = step / steps_of_unit;
                if (step > 0 && unit + of_line >= end) break;
                ptx::cp_async_wait_group<1>();
                ptx::bar_warp_sync();   // all lanes see this step and have read the one before it
                if (in_halves && step == 0 && unit_in_page == 0 &&
                    any_outside(page_read, Ring::unit_words * (end - unit)))
                    return;
                [[maybe_unused]] uint32_t factors_b[tiles], factors_a[fragments];
                [[maybe_unused]] const int scales_at = page_read + (unit_in_page + of_line) * Ring::unit_words * 4;
                if constexpr (Ring::scaled)
                    WideScales<FormatB, values, in_halves>(step % steps_of_unit)
                        .load(factors_b, rings.b.scales.page[0].of_row[0] + scales_at, factors_of_b<Runs>);
                if constexpr (RingOfA::scaled)
                    WideScales<FormatA, values, in_halves>(step % steps_of_unit)
                        .load(factors_a, rings.scales_of_a[0].of_row[0] + scales_at, factors_of_a<Runs>);
                copy_a();
                if constexpr (Warp::stages == 2) ptx::cp_async_commit_group();
                if (step == 0) copy_b();
                ptx::cp_async_commit_group();
#pragma unroll 1
                for (int part = 0; part < parts; ++part) {
                    uint32_t pairs_b[tiles][4], pairs_a[fragments][4];
                    const auto expand_b = [&](int i) {
                        uint32_t words[FormatB::bits / 4];
                        read_eight<FormatB::bits>(words, rows_b.codes + ((rows_b.from ^ 4 * bytes * step) + stage_read +
                                                                         8 * Ring::line * i + FormatB::bits * part));
                        uint32_t scale = 0;
                        if constexpr (Ring::scaled)
                            scale = WideScales<FormatB, values, in_halves>::of_part(factors_b[i], part);
                        pairs_of<Runs, FormatB, Element, order, true>(words, 0, pairs_b[i], scale);
                    };
                    const auto expand_a = [&](int j) {
                        uint32_t words[FormatA::bits / 4], scale = 0;
                        read_eight<FormatA::bits>(words, chunks + (read_a + j * fragment_bytes + FormatA::bits * part));
                        if constexpr (RingOfA::scaled)
                            scale = WideScales<FormatA, values, in_halves>::of_part(factors_a[j], part);
                        pairs_of<Runs, FormatA, Element, order, false>(words, 0, pairs_a[j], scale);
                    };
                    const auto multiply = [&](int j, int i, int k) {
                        const tile::FragmentB of_a = {pairs_a[j][2 * k], pairs_a[j][2 * k + 1]};
                        const tile::FragmentA of_b = {pairs_b[i][2 * k], pairs_b[i + 1][2 * k], pairs_b[i][2 * k + 1],
                                                      pairs_b[i + 1][2 * k + 1]};
                        tile::multiply(sums[j][i / 4][i / 2 % 2], of_b, of_a, Element{});
                    };
                    // Expanded operands meet as soon as they are there, so that conversions and MMAs alternate.
#pragma unroll
                    for (int j = 0; j < fragments; ++j) {
                        expand_a(j);
#pragma unroll
                        for (int k = 0; k < 2; ++k)
#pragma unroll
                            for (int i = 0; i < min(2 * j, tiles); i += 2) multiply(j, i, k);
                        if (2 * j < tiles) {
                            expand_b(2 * j), expand_b(2 * j + 1);
#pragma unroll
                            for (int k = 0; k < 2; ++k)
#pragma unroll
                                for (int other = 0; other <= j; ++other) multiply(other, 2 * j, k);
                        }
                    }
                }
                read_a = next_in_ring(read_a, stage_bytes, Warp::stages);
            }
            stage_read = next_in_ring(stage_read, sizeof(typename Ring::Stage), Ring::stages);
            if constexpr (Ring::scaled) {
                if ((unit + Ring::units - begin) % Ring::page_units == 0)
                    page_read = next_in_ring(page_read, sizeof(typename Ring::Page), Ring::pages);
            }
        }
    };
    if constexpr (few_in_halves<FormatA, FormatB>) {
        using Half = tile::MxRunsToF16<FormatA, FormatB>;
        multiply_lines(Half{});
#pragma unroll
        for (auto &of_fragment : sums)
#pragma unroll
            for (auto &of_half : of_fragment)
#pragma unroll
                for (auto &four : of_half)
#pragma unroll
                    for (int i = 0; i < 4; ++i) four[i] *= Half::lift;
    }
    multiply_lines(typename FewExpanded<FormatA, FormatB>::Runs{});
    ptx::cp_async_wait_group<0>();
    ptx::bar_warp_sync();   // all lanes have read the rings, which the sums overwrite
#pragma unroll
    for (int half = 0; half < wide_halves; ++half)
#pragma unroll
        for (int j = 0; j < fragments; ++j)
            put_transposed(shared.warp[warp].staging[half * wide_rows / 16 + j / 2], sums[j][half], j % 2);
    ptx::griddepcontrol_launch_dependents();
    // The totals and the epilogue: a thread has one column, and every fourth row.
    constexpr int apart = few_warps / wide_halves, some = 16 / apart;   // warps of 32 columns; rows at once
    const int half = warp / apart, row = warp % apart;
    TilePlace there_c = place;
    there_c.first_col += half * few_cols;
    FewElements<some, apart, wide_rows> elements;
    elements.find(options, there_c, rows, row);
    elements.load(options, there_c);
    ptx::bar_sync();   // all threads see the sums of all runs
    using Staging = tile::AccumulatorStaging<few_cols>;
    const int first = Staging::place(row, tile::lane_item(0));
#pragma unroll 1
    for (int of_tile = 0; 16 * of_tile < rows; ++of_tile) {
#pragma unroll
        for (int i = 0; i < some; ++i)
            elements.finish(options, i,
                            total_of_runs<typename FewExpanded<FormatA, FormatB>::Runs>(
                                shared.warp, half * wide_rows / 16 + of_tile, first + i * apart * few_cols));
        elements.target += some * elements.step, elements.left -= 16;
        if (elements.adds) {
            elements.find_more(elements.residual_of(options.epilogue, place),
                               place.first_row + row + 16 * (of_tile + 1),
                               tile::lane_item(there_c.first_col) >> elements.gated);
            elements.load_more();
        }
    }
}

// The same where there is too little shared memory.
template <class FormatA, class FormatB, class RowsA, class RowsB>
__device__ inline void gemm_of_many_few_rows(const RowsA &a, const RowsB &b, const GemmOptions &options) {
    constexpr int most = few_rows<FormatA>;
    auto &shared = ::shared<FewShared<FormatA, FormatB>>();
    const TilePlace place = place_of_few_rows<most, FormatB>(b, options);
    if (!place.there) return ptx::griddepcontrol_wait();
    const int rows = min(place.end_row - place.first_row, most), warp = threadIdx.x / 32;
    FewElements<1> unused;
    multiply_few_rows<FormatA, FormatB, most / 8>(shared, a, b, options, place, unused);
    ptx::griddepcontrol_launch_dependents();
    FewElements<most / 8> elements;
    elements.find(options, place, rows, warp);
    elements.load(options, place);
    ptx::bar_sync();   // all threads see the sums of all runs
    end_elements<typename FewExpanded<FormatA, FormatB>::Runs>(shared.warp, options, elements, rows, warp);
}

template <class FormatA, class FormatB>
using WideOrFewShared =
    std::conditional_t<has_wide_blocks<FormatA, FormatB>, WideShared<FormatA, FormatB>, FewShared<FormatA, FormatB>>;

template <class FormatA, class FormatB, class RowsA, class RowsB>
__device__ inline void gemm_of_wide_or_few(const RowsA &a, const RowsB &b, const GemmOptions &options) {
    if constexpr (has_wide_blocks<FormatA, FormatB>) gemm_of_wide_blocks<FormatA, FormatB>(a, b, options);
    else gemm_of_many_few_rows<FormatA, FormatB>(a, b, options);
}

}   // namespace op

// Entries of this header have neither groups nor quantized results.
#undef GEMM_ENTRY
// clang-format off
#define GEMM_ENTRY(arrays, axes, strides, operand_a, operand_b, level_a, level_b, ...)                                 \
    (WITHOUT_PARENTHESES arrays,                                                                                       \
     const float *bias_f32, const __half *bias_f16, const __nv_bfloat16 *bias_bf16, /* [groups, cols] */               \
     const float *residual_f32, const __half *residual_f16, const __nv_bfloat16 *residual_bf16,                        \
     const float *alphas, /* [alpha_count] */                                                                          \
     float *out_f32, __half *out_f16, __nv_bfloat16 *out_bf16, /* [batch, rows, width], as the residual */             \
     float alpha, int activation, float limit, float gate_alpha, float offset, int in_place,                           \
     WITHOUT_PARENTHESES axes, int rows, int width, int alpha_count, WITHOUT_PARENTHESES strides,                      \
     long long bias_f32_group, long long bias_f16_group, long long bias_bf16_group,                                    \
     long long residual_f32_batch, long long residual_f32_row, long long residual_f16_batch,                           \
     long long residual_f16_row, long long residual_bf16_batch, long long residual_bf16_row, long long out_f32_batch,  \
     long long out_f32_row, long long out_f16_batch, long long out_f16_row, long long out_bf16_batch,                  \
     long long out_bf16_row) {                                                                                         \
        __VA_ARGS__(operand_a, operand_b, op::GemmOptions{                                                             \
            {{bias_bf16, bias_f16, bias_f32, bias_bf16 ? bias_bf16_group : bias_f16 ? bias_f16_group : bias_f32_group},\
             {residual_bf16, residual_f16, residual_f32,                                                               \
              residual_bf16 ? residual_bf16_row : residual_f16 ? residual_f16_row : residual_f32_row},                 \
             {out_bf16, out_f16, out_f32, out_bf16 ? out_bf16_row : out_f16 ? out_f16_row : out_f32_row},              \
             residual_bf16 ? residual_bf16_batch : residual_f16 ? residual_f16_batch : residual_f32_batch,             \
             out_bf16 ? out_bf16_batch : out_f16 ? out_f16_batch : out_f32_batch,                                      \
             nullptr, nullptr, alphas, level_a, level_b, nullptr, alpha, limit, gate_alpha, offset, activation,        \
             0, 0, 0, in_place, alpha_count, 1, width, 0},                                                             \
            nullptr, nullptr, batch, tokens, rows, cols, groups, 0, rows});                                            \
    }
// clang-format on

// An entry for 17 to 64 rows.
#define WIDE_GEMM(name, FormatA, FormatB)                                                                              \
    KERNEL(name, .threads = {32 * op::few_warps}, .shared_bytes = sizeof(op::WideOrFewShared<FormatA, FormatB>),       \
           .tile = {op::has_wide_blocks<FormatA, FormatB> ? op::wide_cols : op::few_cols,                              \
                    op::has_wide_blocks<FormatA, FormatB> ? op::wide_rows : op::few_rows<FormatA>, 1},                 \
           .min_blocks = op::has_wide_blocks<FormatA, FormatB> ? 1 : op::few_blocks)
#define WIDE_GEMM_IN_16_BITS(name, Element, Format)                                                                    \
    WIDE_GEMM(name, Format, Format) GEMM_IN_16_BITS(Element, op::gemm_of_wide_or_few<Format, Format>)
#define WIDE_BLOCK_GEMM(name, FormatA, FormatB)                                                                        \
    WIDE_GEMM(name, FormatA, FormatB) GEMM_IN_BLOCKS(op::gemm_of_wide_or_few<FormatA, FormatB>)
#define WIDE_HALF_GEMM(name, FormatB)                                                                                  \
    WIDE_GEMM(name, tile::Bf16, FormatB) GEMM_OF_BF16_AND_BLOCKS(op::gemm_of_wide_or_few<tile::Bf16, FormatB>)
