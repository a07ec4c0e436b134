// Matrix products of few rows, which are bound by loading B from memory.
//
// The depth is cut into eight runs, one for each warp of a block, for any M, N and machine. Their sums are added in a
// fixed tree, so the bits of a row depend on K and the formats alone. A warp copies one stage of B while it multiplies
// another: lines of 128 bytes of 32 rows, which use whole memory transactions. No warp waits for another. A lane holds
// 16 of every 64 bytes of a row of A. These values are its part of the k of several MMAs in 16 bits, and it reads the
// same k of B from shared memory: A and B share one permutation of k. All blocks read A, so its loads hit the caches;
// they go to registers, ahead of their MMAs.
#pragma once

#include <cstdint>

#include "../ptx/access.cuh"
#include "../ptx/access_early.cuh"
#include "../ptx/alu.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/cp_async_once.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "../tile/few_rows.cuh"
#include "../tile/lanes.cuh"
#include "gemm.cuh"
#include "normed_rows.cuh"

namespace op {

constexpr int few_warps = 8, few_cols = 32;   // warps, and runs of the depth; columns of a block
constexpr int few_blocks = ptx::shared_bytes_per_block > 128 * 1024 ? 2 : 1;   // of a multiprocessor

// Rows of a block: 64, the most that these products serve, or 32 if A is expanded, which needs registers.
template <class FormatA>
constexpr int few_rows = FormatA::bits == 16 ? 64 : 32;

// Up to this many rows, where they begin is in registers.
constexpr int few_rows_in_registers = 16;

// Whether the launch behind may begin as soon as this one has waited, and prefetch while this one reads. With weights
// in 16 bits or many rows, its prefetches and the places of its blocks cost more than they save: it then begins behind
// the products.
template <class FormatB, int row_tiles>
constexpr bool few_let_next_begin = FormatB::bits < 16 && 8 * row_tiles <= few_rows_in_registers;

// Values per scale; without scales, a number above any run of a lane.
template <class Format>
constexpr int values_of_scale = 1 << 16;
template <class Format>
    requires(Format::bits < 16)
constexpr int values_of_scale<Format> = Format::block;

// The scale of blocks behind the end of a row, whose codes are zeros: ue8m0 scales are among those of HalfScales.
template <class Format>
constexpr uint32_t scale_behind_rows = Format::block == tile::mx_block ? 116 : 0;

// Scales of some consecutive values.
template <class Format, int values>
constexpr int scales_of_run = Format::bits == 16 ? 0 : ceil_div(values, values_of_scale<Format>);

// The stages of a warp's run of B, each a line of 32 rows, and pages of its scales, 16 bytes for each row. Runs are
// whole units of 64 bytes, or of the 128 values that one word of scales (two of NVFP4) serves. A page serves one line
// or several: copies of 16 bytes pass by the L1, which has too few lines for those of 32 rows and 16 warps.
template <class Format, int cols = few_cols>
struct FewRing {
    static constexpr int tiles = cols / 8, line = 128;
    static constexpr int values = 8 * line / Format::bits;   // of a line
    static constexpr int unit = Format::bits == 16 ? 32 : 128, units = values / unit;
    static constexpr int unit_bytes = line / units, unit_words = slice_words<Format>;
    struct Stage {
        alignas(line) uint8_t codes[cols * line];
    };
    struct Page {
        alignas(16) uint8_t of_row[cols][16];
    };
    static constexpr bool scaled = unit_words > 0;
    static constexpr int page_units = scaled ? 4 / unit_words : units;
    // One line is read while another one is on its way. A multiprocessor keeps track of a limited number of copies;
    // further ones would hold up loads from shared memory behind them.
    static constexpr int stages = 2, pages = scaled ? ceil_div((stages - 1) * units, page_units) + 1 : 0;
    static_assert(page_units % units == 0);

    struct Pages {
        Page page[at_least_one(pages)];
    };
    struct NoPages {};

    // The units of each run of the depth, and the byte of a row at which run `run` begins.
    __device__ static int units_of_run(int bytes) { return ceil_div(ceil_div(bytes, unit_bytes), few_warps); }
    __device__ static int first_byte(int bytes, int run) { return unit_bytes * units_of_run(bytes) * run; }

    Stage stage[stages];
    [[no_unique_address]] std::conditional_t<scaled, Pages, NoPages> scales;
};

// Whether loads of many rows of A wait in shared memory: two blocks of a multiprocessor lack the registers for them.
// With B in 4 bits, this slows down up to 48 rows more than it speeds up 64.
template <class FormatA, class FormatB>
constexpr bool few_stages_a = few_blocks > 1 && FormatA::bits == 16 && FormatB::bits > 4;

// Whether these products norm rows of A.
template <class FormatA>
constexpr bool few_norms_a = FormatA::bits == 16;

template <class FormatA, class FormatB>
struct FewShared {
    static constexpr int rows = few_rows<FormatA>;
    static constexpr bool stages_a = few_stages_a<FormatA, FormatB>, norms_a = few_norms_a<FormatA>;
    struct Nothing {};
    struct StagedA {
        uint4 fragment[few_warps][rows / 8][32];   // of each warp; a chunk of each lane
    };
    union OfA {   // rows are many or normed
        std::conditional_t<stages_a, StagedA, Nothing> staged;
        std::conditional_t<norms_a, NormedShared, Nothing> normed;
    };
    union Warp {
        FewRing<FormatB> ring;
        tile::AccumulatorStaging<few_cols> staging[rows / 16];
    };
    Warp warp[few_warps];
    union {
        struct {
            const uint8_t *codes_of_a[rows], *scales_of_a[rows];   // where rows of A begin, if registers are too few
        };
        TilePlace place[few_warps];   // of the block, else: its warps need not keep it while they multiply
    };
    [[no_unique_address]] std::conditional_t<stages_a || norms_a, OfA, Nothing> of_a;
};

// Where a row of A begins; `row` is counted from the block's first one.
template <class Format>
struct RowOfA {
    const uint8_t *codes, *scales = nullptr;

    template <class RowsA>
    __device__ RowOfA(const RowsA &a, const GemmOptions &options, const TilePlace &place, int row) {
        const int64_t here = row_of_a(options, place, row);
        codes = a.data + place.matrix * a.batch + here * a.stride;
        if constexpr (Format::bits < 16)
            scales = a.scales + a.places.at(a.first_row + place.matrix * a.scale_rows + here, 0);
    }
};

// A lane's part of A: row g of each of `tiles` fragments, and 16 of the 64 bytes of each step. Loads run ahead of their
// MMAs. Rows past the end repeat the last one and are not stored.
template <class Format, class Shared, int tiles>
struct FewRowsOfA {
    static constexpr int values = 128 / Format::bits, parts = values / 8;   // of a lane in a step; groups of eight
    using Share = tile::StepShare<values>;
    static constexpr bool held = 8 * tiles <= few_rows_in_registers;   // whether pointers are in registers
    static constexpr bool staged = !held && Shared::stages_a;
    static constexpr bool may_be_normed = tiles == 1 && Shared::norms_a;
    // Loads in flight: two steps of few tiles, half a step of many, or one step if parts share words or loads wait in
    // shared memory.
    static constexpr int slots = held                  ? 2 * tiles
                                 : parts > 1 || staged ? tiles
                                                       : tiles / 2,
                         pointers = held ? tiles : 1;
    static constexpr int groups = staged ? slots / 2 : 0;   // of copies in flight, each of two fragments
    static constexpr int scale_count = scales_of_run<Format, values>,
                         step_blocks = 4 * values / values_of_scale<Format>;
    const uint8_t *const *codes_of, *const *scales_of;   // where rows begin, of row g on
    const uint8_t *codes[pointers], *scales[pointers];
    int64_t at;                  // of this lane's chunk of the unit in a row
    int left;                    // bytes from there to the end of a row
    int blocks = 0, block = 0;   // scales of a row; this lane's first one of the unit
    bool swizzled = false;
    uint4 *chunks;   // of this lane in shared memory
    int there;       // rows of the block from this lane's first one on
    uint32_t word[staged ? 1 : slots][4];
    uint32_t scale[slots][scale_count > 0 ? scale_count : 1];

    FewRowsOfA() = default;
    // From value `first` on. Few rows are found here; of others find_rows_of_a() has written where they begin.
    template <class RowsA>
    __device__ FewRowsOfA(Shared &shared, const RowsA &operand, const GemmOptions &options, const TilePlace &place,
                          int first, int warp)
        : codes_of(shared.codes_of_a + Share::row()), scales_of(shared.scales_of_a + Share::row()) {
        there = place.end_row - place.first_row - Share::row();
        if constexpr (staged) chunks = &tile::of_lane(shared.of_a.staged.fragment[warp][0]);
        at = (first + Share::first()) * Format::bits / 8;
        left = operand.bytes - int(at);
        if constexpr (Format::bits < 16) {
            block = (first + Share::first()) / Format::block, blocks = operand.places.blocks;
            swizzled = operand.places.swizzled;
        }
        if constexpr (held) {
#pragma unroll
            for (int i = 0; i < tiles; ++i) {
                const RowOfA<Format> row(operand, options, place, Share::row() + 8 * i);
                codes[i] = row.codes, scales[i] = row.scales;
            }
        }
        if constexpr (may_be_normed) {
            if (operand.weight)
                codes[0] = shared.of_a.normed.bytes + min(Share::row(), Share::row() + there - 1) *
                                                          NormedShared::stride(NormLanes(operand.cols()));
        }
    }

    // This lane's first block of the unit. Where a run has two scales, registers are few: it follows from the byte.
    __device__ int first_block() const {
        return scale_count > 1 ? int(at) / (Format::bits * values_of_scale<Format> / 8) : block;
    }
    // Where a scale of a row is.
    __device__ int place_of(int of_row) const {
        return swizzled ? of_row / 4 * tile::scale_tile_bytes + of_row % 4 : of_row;
    }
    // A pointer from shared memory. Where two blocks share the registers, it is read again for each load.
    __device__ static const uint8_t *begin_of(const uint8_t *const &pointer) {
        if constexpr (few_blocks > 1) return *const_cast<const uint8_t *const volatile *>(&pointer);
        else return pointer;
    }
    // Loads fragment `number`, counted from the first one of this unit on.
    __device__ void load(int number) {
        const int step = number / tiles, tile = number % tiles;
        const uint8_t *const from = (held ? codes[tile % pointers] : begin_of(codes_of[8 * tile])) + at + 64 * step;
        const bool present = left > 64 * step;
        uint32_t (&words)[4] = word[staged ? 0 : number % slots];
        if constexpr (staged) {
            // Rows past the end are zeros: all blocks would meet at the last one in the L2, which these copies read.
            ptx::cp_async_cg_16(static_cast<uint32_t>(__cvta_generic_to_shared(chunks + 32 * (number % slots))), from,
                                present && 8 * tile < there);
            if (number % 2 == 1) ptx::cp_async_commit_group();
        } else if constexpr (may_be_normed) {
            ptx::ld_16(words, from, present);   // normed rows are in shared memory
        } else if constexpr (held) {
            ptx::ld_global_16(words, from, present);
        } else if constexpr (few_blocks > 1) {
            ptx::ld_global_nc_16(words, from, present);
        } else {   // a branch, so that the pointer needs no register before and behind it
            const uint4 chunk = present ? __ldg(reinterpret_cast<const uint4 *>(from)) : uint4{};
            words[0] = chunk.x, words[1] = chunk.y, words[2] = chunk.z, words[3] = chunk.w;
        }
        if constexpr (scale_count > 0) {
            const uint8_t *const row_scales = held ? scales[tile % pointers] : scales_of[8 * tile];
#pragma unroll
            for (int j = 0; j < scale_count; ++j) {
                const int of_row = first_block() + step_blocks * step + j;
                const int place = place_of(of_row);
                scale[number % slots][j] = of_row < blocks ? row_scales[place] : scale_behind_rows<Format>;
            }
        }
    }
    // In place of load() for a fragment without rows.
    __device__ void skip(int number) {
        if (staged && number % 2 == 1) ptx::cp_async_commit_group();
    }
    // Called before each fragment in turn: waits for its group of copies.
    __device__ void await(int number) {
        if (staged && number % 2 == 0) ptx::cp_async_wait_group<groups - 1>();   // the younger ones stay in flight
    }
    // The words of a loaded fragment.
    __device__ const uint32_t (&words_of(int number))[4] {
        if constexpr (staged) {
            const uint4 chunk = chunks[32 * (number % slots)];
            word[0][0] = chunk.x, word[0][1] = chunk.y, word[0][2] = chunk.z, word[0][3] = chunk.w;
            return word[0];
        } else {
            return word[number % slots];
        }
    }
    // Not 0 where a loaded scale is outside of those that `Scales` names.
    template <class Scales>
    __device__ uint32_t outside() const {
        uint32_t any = 0;
#pragma unroll
        for (int i = 0; i < slots; ++i)
#pragma unroll
            for (int j = 0; j < scale_count; ++j) any |= Scales::outside(scale[i][j]);
        return any & 0x80;
    }
    // The same of all scales of a run of `count` blocks from block `first` on. A lane reads those of a quarter.
    template <class Scales>
    __device__ uint32_t outside_of_run(int first, int count) const {
        count = min(count, blocks - first);
        uint32_t any = 0;
#pragma unroll
        for (int i = 0; i < tiles; ++i) {
            const uint8_t *const row_scales = held ? scales[i % pointers] : scales_of[8 * i];
#pragma unroll 4
            for (int j = Share::quarter(); j < count; j += 4) any |= Scales::outside(row_scales[place_of(first + j)]);
        }
        return any & 0x80;
    }
    // Moves on by some steps, which use every slot equally often.
    template <int steps>
    __device__ void next() {
        static_assert(steps * tiles % slots == 0);
        at += 64 * steps, left -= 64 * steps, block += step_blocks * steps;
    }
};

// A lane's part of the lines of B of one warp: it copies 16 bytes of every fourth row into the ring, and reads `bytes`
// of every eighth row in a step.
template <class Format, int bytes, int cols = few_cols>
struct FewRowsOfB {
    using Ring = FewRing<Format, cols>;
    using Lines = tile::SwizzledLines<bytes>;
    static_assert(Ring::line == Lines::line);
    const uint8_t *source;
    int64_t step;
    const uint8_t *codes;   // of the first stage
    uint32_t target;        // where this lane copies to in the first stage
    int from;               // where it reads from in the first stage, in bytes
    int left, there;        // bytes of the run from this lane's next chunk on; of its rows, those that exist

    FewRowsOfB() = default;
    __device__ FewRowsOfB(const Ring &ring, const OperandRows &rows, const GemmOptions &options, const TilePlace &place,
                          int begin, int end) {
        const Lines lines;
        const int row = lines.row, at = Ring::unit_bytes * begin + 16 * lines.chunk;
        source = rows.data + place.group * rows.batch + (place.first_col + row) * rows.stride + at;
        step = 4 * rows.stride;
        codes = ring.stage[0].codes;
        target = static_cast<uint32_t>(__cvta_generic_to_shared(codes)) + lines.target;
        from = lines.from;
        left = min(rows.bytes, Ring::unit_bytes * end) - at;
        there = ceil_div(max(options.cols - place.first_col - row, 0), 4);
    }

    // Starts copying the next line into the stage at `offset`. runs: whether the L2 fetches two lines at once.
    template <bool runs = true>
    __device__ void copy(uint32_t offset) {
#pragma unroll
        for (int i = 0; i < cols / 4; ++i) {
            const uint32_t to = (target ^ 16 * Lines::swizzle(4 * (i % 2))) + offset + 4 * Ring::line * i;
            const bool present = left > 0 && i < there;
            // On an H100, 8192 x 8192 in 16 bits takes 10 % longer with lines that the L2 gives up first.
            if constexpr (!runs) ptx::cp_async_cg_16_once(to, source + i * step, present);
            else if constexpr (Format::bits < 16) ptx::cp_async_cg_16_of_run_once(to, source + i * step, present);
            else ptx::cp_async_cg_16_of_run(to, source + i * step, present);
        }
        source += Ring::line, left -= Ring::line;
    }

    // This lane's part of a step of a column tile; `first` bytes into a line the unit begins.
    __device__ void read(uint32_t (&words)[bytes / 4], uint32_t offset, int first, int step, int tile) const {
        const uint8_t *const place = codes + ((from ^ first ^ 4 * bytes * step) + offset + 8 * Ring::line * tile);
        if constexpr (bytes == 16) {
            const uint4 all = *reinterpret_cast<const uint4 *>(place);
            words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
        } else if constexpr (bytes == 8) {
            const uint2 all = *reinterpret_cast<const uint2 *>(place);
            words[0] = all.x, words[1] = all.y;
        } else {
            words[0] = *reinterpret_cast<const uint32_t *>(place);
        }
    }
};

// A lane's copies of scales: those of one row, a page at a time, in one piece if their addresses allow it. Scales past
// the end of a row become 0, or scale_behind_rows if their addresses are not even multiples of 4.
template <class Format>
struct FewScaleCopies {
    using Ring = FewRing<Format>;
    const uint8_t *source;
    uint8_t *first;        // where this lane copies to in the first page
    int step, left;        // bytes from word to word in memory; scales from the next page to the end of the row
    int words;             // of scales from there to the end of the run
    bool whole, aligned;   // whether pages begin at multiples of 16 bytes, or at least of 4

    FewScaleCopies() = default;
    // Of row `row` of a matrix, from unit `begin` to unit `end`, to the pages of a ring.
    template <class AnyRing>
    __device__ FewScaleCopies(AnyRing &ring, const BlockRows &operand, int matrix, int row, int begin, int end) {
        const tile::ScalePlaces &places = operand.places;
        const int block = 4 * Ring::unit_words * begin;
        source = operand.scales + places.at(operand.first_row + matrix * operand.scale_rows + row, block);
        first = tile::of_lane(ring.scales.page[0].of_row);
        step = places.swizzled ? tile::scale_tile_bytes : 4;
        left = int(places.blocks) - block, words = Ring::unit_words * (end - begin);
        const uintptr_t places_of_rows = reinterpret_cast<uintptr_t>(operand.scales) | places.stride;
        whole = !places.swizzled && (places_of_rows | block) % 16 == 0;
        aligned = places.swizzled || places_of_rows % 4 == 0;
    }

    // Starts copying the next page to the one at `offset`. Unaligned ones go through registers.
    __device__ void copy(uint32_t offset) {
        uint8_t *const target = first + offset;
        if (whole) [[likely]] {
            ptx::cp_async_cg_16(static_cast<uint32_t>(__cvta_generic_to_shared(target)), source, left > 0);
        } else {
#pragma unroll 1
            for (int i = 0; i < min(words, 4); ++i) {
                const uint8_t *const word = source + i * step;
                const int present = min(max(left - 4 * i, 0), 4);
                if (aligned) {
                    ptx::cp_async_ca<4>(static_cast<uint32_t>(__cvta_generic_to_shared(target + 4 * i)), word, present);
                } else {
                    uint32_t scales = 0;
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        scales |= (j < present ? __ldg(word + j) : scale_behind_rows<Format>) << 8 * j;
                    *reinterpret_cast<uint32_t *>(target + 4 * i) = scales;
                }
            }
        }
        source += 4 * step, left -= 16, words -= 4;
    }
};

struct NoScaleCopies {};

// Where the next stage or page of a ring of `count` begins.
__device__ inline uint32_t next_in_ring(uint32_t offset, uint32_t bytes, int count) {
    return offset + bytes == bytes * count ? 0 : offset + bytes;
}

// The run of one warp, and the copies of its lines of B with pages of their scales.
template <class Format, int bytes>
struct FewCopies {
    using Ring = FewRing<Format>;
    int begin, end;   // units of the run
    int filled;       // end of the units in flight
    FewRowsOfB<Format, bytes> rows;
    std::conditional_t<Ring::scaled, FewScaleCopies<Format>, NoScaleCopies> scales;
    uint32_t stage = 0, page = 0;   // where the next ones begin in the ring

    template <class RowsB>
    __device__ FewCopies(Ring &ring, const RowsB &b, const GemmOptions &options, const TilePlace &place, int warp) {
        const int units = ceil_div(b.bytes, Ring::unit_bytes), of_warp = Ring::units_of_run(b.bytes);
        begin = min(warp * of_warp, units), end = min(begin + of_warp, units), filled = begin;
        rows = FewRowsOfB<Format, bytes>(ring, b, options, place, begin, end);
        if constexpr (Ring::scaled) {
            const int row = min(tile::lane_item(place.first_col), options.cols - 1);
            scales = FewScaleCopies<Format>(ring, b, place.group, row, begin, end);
        }
    }

    // Works out the addresses here: the compiler would do it where they are used, behind a wait.
    __device__ void settle() {
        rows.source = ptx::of_this_branch(rows.source), rows.target = ptx::of_this_branch(rows.target);
        rows.left = ptx::of_this_branch(rows.left), rows.there = ptx::of_this_branch(rows.there);
    }

    // How many lines to start before the first is read: those of a run that fits in the ring at once.
    __device__ int lines_at_first() const {
        return end - begin <= Ring::stages * Ring::units ? Ring::stages : Ring::stages - 1;
    }

    // Starts copying the next line as a group. Past the end of the run, it is empty.
    __device__ void start() {
        copy();
        ptx::cp_async_commit_group();
    }
    // The same in the open group.
    __device__ void copy() {
        if (filled < end) {
            rows.copy(stage);
            if constexpr (Ring::scaled) {
                if ((filled - begin) % Ring::page_units == 0) {
                    scales.copy(page);
                    page = next_in_ring(page, sizeof(typename Ring::Page), Ring::pages);
                }
            }
        }
        filled += Ring::units;
        stage = next_in_ring(stage, sizeof(typename Ring::Stage), Ring::stages);
    }
};

// How runs of A and B become pairs of 16 bits.
template <class FormatA, class FormatB>
struct FewExpanded {
    using Runs = tile::RunsToBf16;
};
template <>
struct FewExpanded<tile::Nvfp4, tile::Nvfp4> {
    using Runs = tile::NvRunsToF16;
};
template <>
struct FewExpanded<tile::Bf16, tile::Nvfp4> {
    using Runs = tile::NvRunsToBf16;
};

// Whether values are multiplied in f16 as long as scales allow it.
template <class FormatA, class FormatB>
constexpr bool few_in_halves = values_of_scale<FormatA> == tile::mx_block && values_of_scale<FormatB> == tile::mx_block;

// Whether values in 16 bits are exact for some scales alone, and factors of scales of either operand. Those of B are
// two, of A one twice.
template <class Runs>
constexpr bool checks_scales = requires { typename Runs::ScalesOfA; };
template <class Runs>
__device__ inline uint32_t factors_of_b(uint32_t scales) {
    if constexpr (checks_scales<Runs>) return Runs::ScalesOfB::factors(scales);
    else return Runs::factors(scales);
}
template <class Runs>
__device__ inline uint32_t factor_of_a(uint32_t scale) {
    if constexpr (checks_scales<Runs>) return Runs::ScalesOfA::factor(scale);
    else return Runs::factors(scale * 0x101u);
}

// Not 0 where one of the first `words` words of scales of a row of a page is outside of those that `Scales` names.
template <class Scales, int rows = few_cols>
__device__ inline uint32_t outside_of_page(const uint8_t *page, int words) {
    uint32_t any = 0;
    if (tile::StepShare<1>::first() < words) {   // a lane has the same word of every eighth row
#pragma unroll
        for (int i = 0; i < rows / 8; ++i)
            any |= Scales::outside(reinterpret_cast<const uint32_t *>(page)[tile::lane_item(32 * i)]);
    }
    return any & 0x80808080;
}

// The type of the MMAs.
template <class Runs, class Otherwise>
struct MmaElement {
    using Type = Otherwise;
};
template <class Runs, class Otherwise>
    requires(checks_scales<Runs>)
struct MmaElement<Runs, Otherwise> {
    using Type = typename Runs::Element;
};

// The same pair of 16-bit values in a new register.
__device__ inline uint32_t times_one(uint32_t pair, __nv_bfloat16) {
    return ptx::mul_bf16x2(pair, tile::ExpandedMx::one);
}
__device__ inline uint32_t times_one(uint32_t pair, __half) {
    return ptx::portable::mul_f16x2(pair, tile::ExpandedNv::one);
}

// Eight values of a run, from 8 `part` on, as pairs of 16 bits; `scale` is their scale as such a pair. own: in new
// registers. The words of one load are in neighboring registers; without copies, a fragment made of two loads would be
// copied again for each MMA.
template <class Runs, class Format, class Element, tile::PairOrder order, bool own, int words>
__device__ inline void pairs_of(const uint32_t (&word)[words], int part, uint32_t (&pairs)[4], uint32_t scale) {
    if constexpr (Format::bits < 16) {
        Runs::template eight<Format, order>(pairs, word + part * Format::bits / 4, scale);
    } else if constexpr (order == tile::PairOrder::crossed) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int first = 4 * part + i / 2 * 2;
            pairs[i] = __byte_perm(word[first], word[first + 1], i % 2 == 0 ? 0x5410 : 0x7632);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            pairs[i] = word[4 * part + i];
            if constexpr (own) pairs[i] = times_one(pairs[i], Element{});
        }
    }
}

// A lane's scales of a column in a unit, two at a time: `count` blocks, every `stride`-th from the lane's first one on,
// of which a pair lies in one word. in_halves: each in a half of a word, else in its lower two bytes.
template <class Format, int values, bool in_halves = false>
struct FewScalesOfB {
    static constexpr uint32_t zeros = in_halves ? 0x4040 : 0x4400, one = in_halves ? 0x101 : 0x11;
    static constexpr int unit_steps = FewRing<Format>::unit / (4 * values);
    static constexpr int of_step = scales_of_run<Format, values>, count = unit_steps * of_step;
    static constexpr int stride = of_step > 1 ? 1 : 4 * values / Format::block;
    uint32_t offset;     // of the lane's word of the first pair, from the first scales of a unit on
    uint32_t selector;   // the bytes of the first pair

    __device__ FewScalesOfB() {
        const int block = tile::StepShare<values>::first() / Format::block, byte = block % 4;
        offset = 16 * tile::StepShare<values>::row() + 4 * (block / 4);
        selector = zeros | byte | (count > 1 ? byte + stride : byte) << (in_halves ? 8 : 4);
    }
    // Pair `pair` of column tile `tile`. `scales` is where the unit's scales of the first row begin.
    __device__ uint32_t bytes(const uint8_t *scales, int pair, int tile) const {
        const int first = 2 * pair * stride, place = 4 * (first / 4) + 16 * 8 * tile;
        const uint32_t word = *reinterpret_cast<const uint32_t *>(scales + (offset + place));
        return __byte_perm(word, 0, selector + first % 4 * one);
    }
};
template <class Format, int values, bool in_halves>
    requires(Format::bits == 16)
struct FewScalesOfB<Format, values, in_halves> {};

// Stores accumulators whose rows are columns of C into a staging, as rows 8 `half` to 8 `half` + 7 of C. Called by the
// whole warp.
__device__ inline void put_transposed(tile::AccumulatorStaging<few_cols> &staging,
                                      const tile::Accumulator (&sums)[few_cols / 16], int half) {
    using Staging = tile::AccumulatorStaging<few_cols>;
    const int first = Staging::place(tile::accumulator_column(0), tile::accumulator_row(0)) + 8 * few_cols * half;
#pragma unroll
    for (int i = 0; i < few_cols / 16; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {   // row 1 differs from row 0 in a bit of the chunk, too
            const int row = j % 2, column = 16 * i + 8 * (j / 2);
            staging.words[(first ^ Staging::place(0, column) ^ (Staging::place(row, 0) - few_cols * row)) +
                          few_cols * row] = sums[i][j];
        }
}

// Writes where the rows of A of a block begin to shared memory.
template <class FormatA, class Shared, class RowsA>
__device__ inline void find_rows_of_a(Shared &shared, const RowsA &a, const GemmOptions &options,
                                      const TilePlace &place) {
    if (threadIdx.x >= Shared::rows) return;
    const RowOfA<FormatA> row(a, options, place, threadIdx.x);
    shared.codes_of_a[threadIdx.x] = row.codes;
    if constexpr (FormatA::bits < 16) shared.scales_of_a[threadIdx.x] = row.scales;
}

// The epilogue of floats without an activation, or with a gate: a thread has one sum of every eighth row. Its addresses
// are found and its numbers are on their way while the block multiplies, so that little code follows, which the block
// fetches from memory. The residual is among them, of up to 8 `eights` rows; of more it is left to Epilogue.
//
// eights: how many rows have their residual in registers; `apart`: from row to row; most: rows whose residual is added.
template <int eights, int apart = 8, int most = apart * eights>
struct FewElements {
    // A number in memory, and its bits, which nothing waits for until it is used.
    struct Number {
        const uint8_t *source;
        uint32_t bits;
    };
    bool wanted = false, gated, biased, adds;
    int left;   // rows from this thread's first one on; 0 if it stores nothing
    uint8_t *target;
    int64_t step;   // bytes from row to row of this thread
    TypedRows::Type type, bias_type, more_type;
    float factor, level_a, level_b;
    Number bias, more[eights];

    // Finds the addresses, for the first `rows` rows of the block and the columns of `place`; `warp` counts the warps
    // of these columns. Called by all of them.
    __device__ void find(const GemmOptions &options, const TilePlace &place, int rows, int warp) {
        const EpilogueOptions &to = options.epilogue;
        const Activation activation = Activation(to.activation);
        const TypedRows biases(to.bias, 0), out(to.out, place.matrix * to.out_batch);
        const TypedRows residual = residual_of(to, place);
        gated = activation == Activation::swiglu, adds = residual.there();
        wanted = EndingFormat(to.ending) == EndingFormat::none && (gated || activation == Activation::none) &&
                 !(adds && rows > most);
        const int of_sum = tile::lane_item(place.first_col), column = of_sum >> gated;
        const int row = place.first_row + warp;
        const bool there = wanted && of_sum < options.cols;
        left = there && !(gated && threadIdx.x % 2) ? rows - warp : 0;
        target = out.at(row, column), step = apart * out.stride, type = out.type;
        biased = there && biases.there(), adds &= wanted;
        bias.source = biases.at(place.group, of_sum), bias_type = biases.type;
        more_type = residual.type;
        find_more(residual, row, column);
    }

    __device__ static TypedRows residual_of(const EpilogueOptions &to, const TilePlace &place) {
        return to.in_place ? TypedRows(to.out, place.matrix * to.out_batch)
                           : TypedRows(to.residual, place.matrix * to.residual_batch);
    }

    // Finds the residual of rows from `row` on.
    __device__ void find_more(const TypedRows &residual, int row, int column) {
#pragma unroll
        for (int i = 0; i < eights; ++i) more[i].source = residual.at(row + apart * i, column);
    }

    // Starts loading. Called behind the wait.
    __device__ void load(const GemmOptions &options, const TilePlace &place) {
        const EpilogueOptions &to = options.epilogue;
        factor = to.alphas ? to.alphas[min(place.group, to.alpha_count - 1)] : to.alpha;
        level_a = to.a_global ? *to.a_global : 1.0f, level_b = to.b_global ? *to.b_global : 1.0f;
        if (biased) start(bias, bias_type);
        load_more();
    }

    // Starts loading the residual of the rows that were found, of which `left` exist.
    __device__ void load_more() {
        if (!adds) return;
#pragma unroll
        for (int i = 0; i < eights; ++i)
            if (apart * i < left) start(more[i], more_type);
    }

    // Ends with this thread's sum of the `number`-th eight rows. Called by whole warps.
    __device__ void finish(const GemmOptions &options, int number, float sum) const {
        const EpilogueOptions &to = options.epilogue;
        float value = fmaf(sum, factor * (level_a * level_b), biased ? value_of(bias, bias_type) : -0.0f);
        if (gated) {
            const Gate gate = {to.limit, to.gate_alpha, to.offset};
            value = gate(value, ptx::shfl_sync_bfly_f32(value, 1));
        }
        if (apart * number >= left) return;
        if (adds) value += value_of(more[eights > 1 ? number : 0], more_type);
        TypedRows::store_at(target + number * step, type, value);
    }

private:
    __device__ static void start(Number &number, TypedRows::Type type) {
        if (type == TypedRows::Type::f32) number.bits = *reinterpret_cast<const uint32_t *>(number.source);
        else number.bits = *reinterpret_cast<const uint16_t *>(number.source);
    }
    __device__ static float value_of(const Number &number, TypedRows::Type type) {
        return type == TypedRows::Type::f32    ? __uint_as_float(number.bits)
               : type == TypedRows::Type::bf16 ? __uint_as_float(number.bits << 16)
                                               : __half2float(__ushort_as_half(number.bits));
    }
};

// sums += the products of the four values in pairs 2 `half` and 2 `half` + 1 of each lane: columns of C are rows of the
// MMAs.
template <int tiles, class Element>
__device__ inline void multiply_pairs(tile::Accumulator (&sums)[tiles / 2], const uint32_t (&pairs_b)[tiles][4],
                                      const uint32_t (&pairs_a)[4], int half, Element) {
    const tile::FragmentB of_a = {pairs_a[2 * half], pairs_a[2 * half + 1]};
#pragma unroll
    for (int i = 0; i < tiles; i += 2) {
        const tile::FragmentA of_b = {pairs_b[i][2 * half], pairs_b[i + 1][2 * half], pairs_b[i][2 * half + 1],
                                      pairs_b[i + 1][2 * half + 1]};
        tile::multiply(sums[i / 2], of_b, of_a, Element{});
    }
}

// The sums of one warp over 8 `row_tiles` rows and 32 columns, to its staging. Columns of C are rows of the MMAs:
// expanded B is the operand with 16 rows, A the operand with 8, whose loaded words are fragments already. Called by all
// threads. Addresses are worked out before the wait for the launches ahead, unless the order of rows is in memory.
template <class FormatA, class FormatB, int row_tiles, class RowsA, class RowsB, int eights>
__device__ inline void multiply_few_rows(FewShared<FormatA, FormatB> &shared, const RowsA &a, const RowsB &b,
                                         const GemmOptions &options, const TilePlace &place,
                                         FewElements<eights> &elements) {
    constexpr auto order = FormatB::bits == 4 ? tile::PairOrder::crossed : tile::PairOrder::natural;
    using Ring = FewRing<FormatB>;
    using PartOfA = FewRowsOfA<FormatA, FewShared<FormatA, FormatB>, row_tiles>;
    constexpr int values = PartOfA::values, parts = PartOfA::parts, tiles = Ring::tiles;   // of a lane in a step
    // One unit at a time, or all units of a line if a unit is a single step.
    constexpr int steps_of_unit = Ring::unit / (4 * values), units_at_once = steps_of_unit > 1 ? 1 : Ring::units;
    constexpr int steps = units_at_once * steps_of_unit;
    constexpr int words = values * FormatB::bits / 32;
    const int warp = ptx::of_this_branch(threadIdx.x / 32);
    Ring &ring = shared.warp[warp].ring;
    FewCopies<FormatB, values * FormatB::bits / 8> copies(ring, b, options, place, warp);
    copies.settle();
    const auto begin_b = [&] {
#pragma unroll 1
        for (int i = 0; i < copies.lines_at_first(); ++i) copies.start();
    };
    PartOfA rows_a;
    const auto find_a = [&](const GemmOptions &options) {
        if constexpr (!PartOfA::held) {
            find_rows_of_a<FormatA>(shared, a, options, place);
            ptx::bar_sync();   // all threads see where rows of A begin
        }
        rows_a = PartOfA(shared, a, options, place, copies.begin * Ring::unit, warp);
    };
    const auto begin_a = [&] {
#pragma unroll
        for (int i = 0; i < PartOfA::slots; ++i) rows_a.load(i);
    };
    NormOf<RowsA, PartOfA::may_be_normed> norm(a, place);
    // Rows of A are found before the wait, unless their order is in memory. Normed ones are in order.
    const bool ordered = options.order;
    if (!ordered) {
        GemmOptions in_order = options;
        in_order.order = nullptr;   // so that the compiler knows it
        find_a(in_order);
    }
    const int rows = place.end_row - place.first_row;
    if constexpr (eights == row_tiles) elements.find(options, place, rows, warp);
    ptx::griddepcontrol_wait();
    if constexpr (few_let_next_begin<FormatB, row_tiles>) ptx::griddepcontrol_launch_dependents();
    norm.load();
    const bool ahead = PartOfA::held && !ordered && !norm.wanted();   // loads of A do not queue behind copies of B
    if (ahead) begin_a();
    if constexpr (eights == row_tiles) elements.load(options, place);   // neither do these
    begin_b();
    if (ordered) find_a(options);
    norm.store(shared);
    if (!ahead) begin_a();
    uint32_t stage_read = 0, page_read = 0;   // where the present ones begin in the ring

    tile::Accumulator sums[row_tiles][tiles / 2] = {};
    // Whether all scales of A of the run are looked at first, instead of those in registers before each line.
    constexpr bool checks_ahead = !PartOfA::held || units_at_once < Ring::units;
    int unit = copies.begin;
    // The lines of the run from `unit` on, in 16 bits as `Runs` says; at most up to one whose scales are outside.
    const auto multiply_lines = [&](auto in_16_bits) {
        using Runs = decltype(in_16_bits);
        constexpr bool in_halves = checks_scales<Runs>;
        using Element = typename MmaElement<Runs, typename Expanded<FormatA, FormatB>::Element>::Type;
        [[maybe_unused]] const FewScalesOfB<FormatB, values, in_halves> lane_scales;
#pragma unroll 1
        for (; unit < copies.end; unit += Ring::units) {
            ptx::cp_async_wait_group<Ring::stages - 2 + PartOfA::groups>();
            ptx::bar_warp_sync();   // all lanes see this stage and have read the one before it
            [[maybe_unused]] const int unit_in_page = (unit - copies.begin) % Ring::page_units;
            if constexpr (few_in_halves<FormatA, FormatB>) {
                if constexpr (in_halves) {
                    uint32_t outside = checks_ahead ? 0 : rows_a.template outside<typename Runs::ScalesOfA>();
                    if (unit_in_page == 0)
                        outside |= outside_of_page<typename Runs::ScalesOfB>(ring.scales.page[0].of_row[0] + page_read,
                                                                             Ring::unit_words * (copies.end - unit));
                    if (ptx::vote_sync_any(outside)) return;
                }
            }
            copies.start();
#pragma unroll 1
            for (int of_line = 0; of_line < Ring::units; of_line += units_at_once) {
                if (of_line > 0 && unit + of_line >= copies.end) break;
                [[maybe_unused]] uint32_t two_scales[tiles];
#pragma unroll
                for (int step = 0; step < steps; ++step) {
                    if (units_at_once > 1 && step > 0 && unit + step >= copies.end) break;
                    uint32_t words_b[tiles][words], scale_b[tiles] = {};
#pragma unroll
                    for (int i = 0; i < tiles; ++i)
                        copies.rows.read(words_b[i], stage_read, of_line * Ring::unit_bytes, step, i);
#pragma unroll
                    for (int part = 0; part < parts; ++part) {
                        uint32_t pairs_b[tiles][4];
#pragma unroll
                        for (int i = 0; i < tiles; ++i) {
                            if constexpr (Ring::scaled) {
                                if (8 * part % FormatB::block == 0) {
                                    const int unit_of_page = unit_in_page + of_line + step / steps_of_unit;
                                    const int number =
                                        step % steps_of_unit * lane_scales.of_step + 8 * part / FormatB::block;
                                    if (number % 2 == 0) {
                                        const uint8_t *const first = ring.scales.page[0].of_row[0] + page_read +
                                                                     unit_of_page * Ring::unit_words * 4;
                                        two_scales[i] = factors_of_b<Runs>(lane_scales.bytes(first, number / 2, i));
                                    }
                                    scale_b[i] = ptx::mov_b32_half_twice(two_scales[i], number % 2 != 0);
                                }
                            }
                            pairs_of<Runs, FormatB, Element, order, true>(words_b[i], part, pairs_b[i], scale_b[i]);
                        }
#pragma unroll
                        for (int j = 0; j < row_tiles; ++j) {
                            const int number = step * row_tiles + j;
                            if constexpr (PartOfA::staged) {   // one part; up to 48 rows leave fragments empty
                                rows_a.await(number);
                                if (8 * j >= rows) {   // the fragment has no rows
                                    rows_a.skip(number + PartOfA::slots);
                                    continue;
                                }
                            }
                            uint32_t pairs_a[4], scale = 0;
                            if constexpr (FormatA::bits < 16)
                                scale = factor_of_a<Runs>(
                                    rows_a.scale[number % PartOfA::slots][8 * part / values_of_scale<FormatA>]);
                            pairs_of<Runs, FormatA, Element, order, false>(rows_a.words_of(number), part, pairs_a,
                                                                           scale);
#pragma unroll
                            for (int half = 0; half < 2; ++half)
                                multiply_pairs(sums[j], pairs_b, pairs_a, half, Element{});
                            if (part == parts - 1) rows_a.load(number + PartOfA::slots);
                        }
                    }
                }
                rows_a.template next<steps>();
            }
            stage_read = next_in_ring(stage_read, sizeof(typename Ring::Stage), Ring::stages);
            if constexpr (Ring::scaled) {
                if ((unit + Ring::units - copies.begin) % Ring::page_units == 0)
                    page_read = next_in_ring(page_read, sizeof(typename Ring::Page), Ring::pages);
            }
        }
    };
    if constexpr (few_in_halves<FormatA, FormatB>) {
        using Half = tile::MxRunsToF16<FormatA, FormatB>;
        constexpr int blocks = Ring::unit / FormatA::block;   // of a unit
        bool inside = true;
        if constexpr (checks_ahead)
            inside = !ptx::vote_sync_any(rows_a.template outside_of_run<typename Half::ScalesOfA>(
                blocks * copies.begin, blocks * (copies.end - copies.begin)));
        if (inside) multiply_lines(Half{});
#pragma unroll
        for (auto &of_tile : sums)
#pragma unroll
            for (auto &four : of_tile)
#pragma unroll
                for (int i = 0; i < 4; ++i) four[i] *= Half::lift;
    }
    multiply_lines(typename FewExpanded<FormatA, FormatB>::Runs{});
    ptx::cp_async_wait_group<0>();
    ptx::bar_warp_sync();   // all lanes have read the ring, which the sums overwrite
    // The sums, as rows of C.
#pragma unroll
    for (int j = 0; j < row_tiles; ++j) put_transposed(shared.warp[warp].staging[j / 2], sums[j], j % 2);
}

// Finds the place of this block in C. Unless it depends on the sizes of groups, which are in memory, the launch ahead
// may still run. Rows of B are then prefetched into the L2: the launches see each other's memory there, so that this is
// right even if that launch writes B.
template <int rows, class FormatB, class RowsB>
__device__ inline TilePlace place_of_few_rows(const RowsB &b, const GemmOptions &options) {
    if (options.group_starts) {
        ptx::griddepcontrol_wait();
        return TilePlace::of_block<rows, few_cols, false, true>(options);
    }
    GemmOptions without_groups = options;
    without_groups.group_starts = nullptr;   // so that the compiler knows it
    const TilePlace place = TilePlace::of_block<rows, few_cols, false, true>(without_groups);
    // Only for blocks that may begin early: the first line of every run, or of every second one of long runs. A block
    // that reads for long gains nothing by more, and copies that meet prefetches on their way take longer.
    constexpr int early_blocks = 512, short_run = 256;
    const int run = threadIdx.x / 32, of_run = FewRing<FormatB>::first_byte(b.bytes, 1);
    const int row = tile::lane_item(place.first_col), first = of_run * run;
    if (blockIdx.x < early_blocks && options.rows <= few_rows_in_registers && (of_run <= short_run || run % 2 == 0) &&
        row < options.cols && first < b.bytes)
        ptx::prefetch_global_l2_early(b.data + place.group * b.batch + row * b.stride + first);
    return place;
}

// The total over all runs of element `at` of a staging.
template <class Runs, class Warp>
__device__ inline float total_of_runs(const Warp (&of_run)[few_warps], int tile, int at) {
    float sum[few_warps];
#pragma unroll
    for (int j = 0; j < few_warps; ++j) sum[j] = of_run[j].staging[tile].words[at];
#pragma unroll
    for (int width = 1; width < few_warps; width *= 2)
#pragma unroll
        for (int j = 0; j < few_warps; j += 2 * width) sum[j] += sum[j + width];
    return sum[0] * Runs::lift;
}

// Adds the sums of all runs and ends 32 columns of C: by the few_warps warps that hold a run each, of which this is
// number `run`. Called by all threads of the block, behind a barrier. Returns false, and does nothing, for elements
// that are not wanted. Elements of more than eight rows suit all calls.
template <class Runs, class Warp, int eights>
__device__ inline bool end_elements(const Warp (&of_run)[few_warps], const GemmOptions &options,
                                    const FewElements<eights> &elements, int rows, int run) {
    const int first = tile::AccumulatorStaging<few_cols>::place(run, tile::lane_item(0));
    const auto end = [&](int i) {
        elements.finish(options, i, total_of_runs<Runs>(of_run, i / 2, first + i % 2 * 8 * few_cols));
    };
    if constexpr (eights > 1) {
#pragma unroll
        for (int i = 0; i < eights; ++i)
            if (8 * i < rows) end(i);
        return true;
    }
    if (!elements.wanted) return false;
#pragma unroll 1
    for (int i = 0; 8 * i < rows; ++i) end(i);
    return true;
}

// The same for any epilogue.
template <class Runs, class Warp>
__device__ inline void end_few_rows(Warp (&of_run)[few_warps], const GemmOptions &options, const TilePlace &place,
                                    int rows, int run) {
    using Staging = tile::AccumulatorStaging<few_cols>;
    // Loads of its numbers are in flight while the block adds.
    const Epilogue epilogue(options.epilogue, place.matrix, place.group, options.rows, options.cols);
#pragma unroll 1
    for (int i = tile::lane_item(32 * run); i < rows * few_cols; i += 32 * few_warps) {
        const int tile = i / (16 * few_cols), at = Staging::place(i / few_cols % 16, i % few_cols);
        of_run[0].staging[tile].words[at] = total_of_runs<Runs>(of_run, tile, at);
    }
    ptx::bar_sync();   // all threads see their total
    // The epilogue: 16 rows for a warp.
    if (16 * run < rows)
        epilogue.finish(of_run[0].staging[run], place.first_row + 16 * run, place.end_row, place.first_col,
                        epilogue.lane_bias<Staging>(place.first_col));
}

// C of few rows and 32 columns. For up to 8 rows a warp has one fragment of rows, for up to 16 rows two, else enough
// for all rows, so that B is read once.
template <class FormatA, class FormatB, class RowsA, class RowsB>
__device__ inline void gemm_of_few_rows(const RowsA &a, const RowsB &b, const GemmOptions &options) {
    auto &shared = ::shared<FewShared<FormatA, FormatB>>();
    using Runs = typename FewExpanded<FormatA, FormatB>::Runs;
    constexpr int most = few_rows<FormatA>;
    TilePlace place = place_of_few_rows<most, FormatB>(b, options);
    const int warp = threadIdx.x / 32;
    if (!place.there) {
        ptx::griddepcontrol_wait();
        if (place.fills) fill_scale_tiles(options.epilogue, options.rows, place.first_col, few_cols);
        return;
    }
    const auto rows_of = [](const TilePlace &of) { return min(of.end_row - of.first_row, most); };
    // The sums over this warp's run of the depth.
    if (rows_of(place) <= 8) {
        if (tile::lane_item(0) == 0) shared.place[warp] = place;
        FewElements<1> elements;
        multiply_few_rows<FormatA, FormatB, 1>(shared, a, b, options, place, elements);
        ptx::griddepcontrol_launch_dependents();   // where it was not called before
        ptx::bar_sync();                           // all threads see the sums of all runs
        if (end_elements<Runs>(shared.warp, options, elements, 8, warp)) return;
        place = shared.place[warp];
    } else {
        FewElements<1> elements;
        if (rows_of(place) <= few_rows_in_registers)
            multiply_few_rows<FormatA, FormatB, 2>(shared, a, b, options, place, elements);
        else multiply_few_rows<FormatA, FormatB, most / 8>(shared, a, b, options, place, elements);
        ptx::griddepcontrol_launch_dependents();
        elements.find(options, place, rows_of(place), warp);
        elements.load(options, place);
        ptx::bar_sync();
        if (end_elements<Runs>(shared.warp, options, elements, rows_of(place), warp)) return;
    }
    if (place.fills) fill_scale_tiles(options.epilogue, options.rows, place.first_col, few_cols);
    end_few_rows<Runs>(shared.warp, options, place, rows_of(place), warp);
}

}   // namespace op

// An entry for few rows.
#define FEW_GEMM(name, FormatA, FormatB)                                                                               \
    KERNEL(name, .threads = {32 * op::few_warps}, .shared_bytes = sizeof(op::FewShared<FormatA, FormatB>),             \
           .tile = {op::few_cols, op::few_rows<FormatA>, 1}, .min_blocks = op::few_blocks)
#define FEW_BLOCK_GEMM(name, FormatA, FormatB)                                                                         \
    FEW_GEMM(name, FormatA, FormatB) GEMM_IN_BLOCKS(op::gemm_of_few_rows<FormatA, FormatB>)
// The same with A in 16 bits, whose rows may be normed.
// clang-format off
#define FEW_GEMM_IN_16_BITS(name, Element, Format)                                                                     \
    FEW_GEMM(name, Format, Format)                                                                                     \
    GEMM_ENTRY((const Element *a,        /* [batch, tokens, halves depth] */                                       \
                const Element *b,        /* [groups, cols, depth] */                                                   \
                const float *a_norm),    /* [depth] or null */                                                         \
               (float a_eps, int batch, int tokens, int halves, int depth, int groups, int cols),                      \
               (long long a_batch, long long a_row, long long b_group, long long b_row),                               \
               (op::NormedRows<Element>{op::rows_in_16_bits(a, a_batch, a_row, depth), a_norm, a_eps, halves == 2}),   \
               op::rows_in_16_bits(b, b_group, b_row, depth), nullptr, nullptr, op::gemm_of_few_rows<Format, Format>)
#define FEW_HALF_GEMM(name, FormatB)                                                                                   \
    FEW_GEMM(name, tile::Bf16, FormatB)                                                                                \
    GEMM_ENTRY((const __nv_bfloat16 *a,  /* [batch, tokens, halves depth] */                                       \
                const uint8_t *b_codes,  /* [groups, cols, b_bytes] */                                                 \
                const uint8_t *b_scales, /* [b_scale_bytes] */                                                         \
                const float *a_norm,     /* [depth] or null */                                                         \
                const float *b_global),  /* [1] or null */                                                             \
               (float a_eps, int b_blocks, int b_swizzled, int b_scale_rows, int b_first_row,                          \
                int batch, int tokens, int halves, int depth, int groups, int cols, int b_bytes,                       \
                long long b_scale_bytes),                                                                              \
               (long long a_batch, long long a_row, long long b_group, long long b_row),                               \
               (op::NormedRows<__nv_bfloat16>{op::rows_in_16_bits(a, a_batch, a_row, depth), a_norm, a_eps,            \
                                              halves == 2}),                                                           \
               op::BlockRows(b_codes, b_group, b_row, b_bytes, b_scales, b_blocks, b_swizzled, b_scale_rows,           \
                             b_first_row),                                                                             \
               nullptr, b_global, op::gemm_of_few_rows<tile::Bf16, FormatB>)
// clang-format on
