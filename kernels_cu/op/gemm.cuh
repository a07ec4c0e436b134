// Matrix products C = activation(alpha A B^T + bias) + residual on tensor cores. A is [rows, depth], B is [cols,
// depth].
//
// A block computes a tile of C. cp.async fills stages in shared memory with slices of A and B along the depth, while
// earlier slices are multiplied. Each element has one float32 accumulator, to which the tensor core adds in ascending
// k, so no bit of C depends on the tile. A Core for each pair of formats loads slices as operands of MMAs.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernel.cuh"
#include "../ptx/alu.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/cp_async_if.cuh"
#include "../ptx/target.cuh"
#include "../ptx/warp.cuh"
#include "../tile/block_tiles.cuh"
#include "../tile/contained.cuh"
#include "../tile/expansion.cuh"
#include "../tile/fragment.cuh"
#include "../tile/lanes.cuh"
#include "../tile/scale_places.cuh"
#include "../tile/shared.cuh"
#include "../tile/staging.cuh"
#include "epilogue.cuh"

namespace op {

// What an entry takes besides its operands.
struct GemmOptions {
    EpilogueOptions epilogue;
    const int *group_starts;   // [groups + 1] or null: rows group_starts[g] to group_starts[g + 1] meet B of group g
    const int *order;          // [rows] or null: which row of A each row of C is made of
    int batch, tokens, rows, cols, groups;
    int least_rows, most_rows;   // groups of other sizes are left to another launch
};

// The rows of an operand: `stride` bytes from row to row, `batch` bytes from matrix to matrix, `bytes` per row (a
// multiple of 16).
struct OperandRows {
    const uint8_t *data;
    int64_t batch, stride;
    int bytes;
};

// The tile of C that a block works on.
struct TilePlace {
    int matrix = 0, group = 0;   // matrix of A and C; matrix of B
    int first_row = 0, end_row = 0, first_col = 0;
    int tiles = 1;                       // that the block walks over, in consecutive columns
    bool there = false, fills = false;   // fills: this block also pads the last tile of scales in its columns

    // Consecutive blocks take the tiles of a band of eight rows of tiles, column by column, so that their rows of A and
    // B hit the L2. Each group begins with a new tile; a block without a tile gets there = false.
    // undivided: a single row of tiles skips the divisions, which few rows would wait for.
    template <int tile_rows, int tile_cols, bool walks = false, bool undivided = false>
    __device__ static TilePlace of_block(const GemmOptions &options) {
        constexpr int band = 8;
        TilePlace place;
        const int tiles = ceil_div(options.cols, tile_cols), blocks = gridDim.x;
        if (walks && tiles > blocks) place.tiles = ceil_div(tiles, blocks);
        const int first = blockIdx.y / band * band, height = min(int(gridDim.y) - first, band);
        const uint32_t of_band = blockIdx.y % band * gridDim.x + blockIdx.x;
        int row_tile = 0, col_tile = blockIdx.x;
        if (!undivided || gridDim.y > 1) row_tile = first + of_band % height, col_tile = of_band / height;
        place.first_col = col_tile * place.tiles * tile_cols;
        place.matrix = place.group = blockIdx.z;
        place.end_row = options.rows;
        place.fills = row_tile == 0 && blockIdx.z == gridDim.z - 1;
        if (options.group_starts) {
            place.matrix = 0;
            // A lane for each of 32 groups. This tile's group is the first whose tiles and earlier ones include it.
            int start = 0, end = 0;
            uint32_t found = 0;
            for (int some = 0; some < options.groups && !found; some += 32) {
                const int group = min(tile::lane_item(some), options.groups);
                start = options.group_starts[group], end = options.group_starts[min(group + 1, options.groups)];
                const bool mine = end - start >= options.least_rows && end - start <= options.most_rows;
                const int tiles = mine ? max(ceil_div(end - start, tile_rows), 0) : 0, sum = tile::sum_to_lane(tiles);
                found = ptx::vote_sync_ballot(row_tile < sum);
                const int lane = found ? __ffs(found) - 1 : 31;
                row_tile -= ptx::shfl_sync_idx_b32(found ? sum - tiles : sum, lane);
                place.group = some + lane;
                start = ptx::shfl_sync_idx_b32(start, lane), end = ptx::shfl_sync_idx_b32(end, lane);
            }
            if (!found) return place;
            place.first_row = start;
            place.end_row = min(end, options.rows);
        }
        place.first_row += row_tile * tile_rows;
        place.there = place.first_row < place.end_row;
        return place;
    }
};

// The copies of a thread: one 16-byte chunk in every `step`-th row of a tile of a stage.
template <class Tile, int threads>
struct ChunkCopies {
    static constexpr int chunks = Tile::row_chunks, step = threads / chunks, count = Tile::rows / step;
    static_assert(step % 8 == 0 && Tile::rows % step == 0, "all rows of a thread have the same swizzle");

    __device__ static int row() { return threadIdx.x / chunks; }
    __device__ static int chunk() { return threadIdx.x % chunks; }
};

// The row of A for a row of the tile; rows past the end repeat the last one.
__device__ inline int row_of_a(const GemmOptions &options, const TilePlace &place, int row) {
    const int here = min(place.first_row + row, place.end_row - 1);
    return options.order ? options.order[here] : here;
}

// The same with other rows past the end: the first ones of all, or the last one. A line that many blocks read over and
// over comes slowly.
__device__ inline int any_row_of_a(const GemmOptions &options, const TilePlace &place, int row) {
    int here = place.first_row + row;
    if (here >= place.end_row) here = min(row, place.end_row - 1);
    return options.order ? options.order[here] : here;
}

// Copies rows of A, in any order, into stages. Rows past the end repeat others and are not stored. spreads: not all the
// same one.
template <class Tile, int threads, bool spreads = false>
struct GatheredRows : ChunkCopies<Tile, threads> {
    using Copies = ChunkCopies<Tile, threads>;
    const uint8_t *source;            // this thread's chunk of row 0
    uint32_t offset[Copies::count];   // of the rows, in chunks of 16 bytes: half the registers of addresses
    uint32_t target;
    int left;   // bytes from this thread's chunk to the end of a row

    __device__ GatheredRows(const Tile &first_stage, const OperandRows &rows, const GemmOptions &options,
                            const TilePlace &place) {
#pragma unroll
        for (int i = 0; i < Copies::count; ++i) {
            const int here = Copies::row() + i * Copies::step;
            const int row = spreads ? any_row_of_a(options, place, here) : row_of_a(options, place, here);
            offset[i] = row * rows.stride / 16;
        }
        source = rows.data + place.matrix * rows.batch + 16 * Copies::chunk();
        target = first_stage.address(Copies::row(), Copies::chunk());
        left = rows.bytes - 16 * Copies::chunk();
    }

    // Starts copying the i-th chunk. Called for i = 0 .. count - 1 in order, then done().
    __device__ void copy(int i, uint32_t stage_offset) {
        ptx::cp_async_cg_16_if(left > 0, Tile::moved(target + stage_offset, i * Copies::step, 0),
                               source + uint64_t(offset[i]) * 16);
    }
    __device__ void done() {
        source += 16 * Copies::chunks;
        left -= 16 * Copies::chunks;
    }
    // Goes back by a number of slices.
    __device__ void rewind(int slices) {
        source -= slices * (16 * Copies::chunks);
        left += slices * (16 * Copies::chunks);
    }
};

// Copies consecutive rows of B into stages, `piece` bytes into each chunk of 16. Rows past the end become zeros.
template <class Tile, int threads, int piece = 16>
struct ConsecutiveRows : ChunkCopies<Tile, threads> {
    using Copies = ChunkCopies<Tile, threads>;
    const uint8_t *source;
    int64_t step_bytes;
    uint32_t target;
    int left, there;   // bytes from this thread's chunk to the end of a row; rows of this thread, 0 past that end

    __device__ ConsecutiveRows(const Tile &first_stage, const OperandRows &rows, int matrix, int first_row,
                               int end_row) {
        const int row = first_row + Copies::row();
        there = ceil_div(max(end_row - row, 0), Copies::step);
        source = rows.data + matrix * rows.batch + row * rows.stride + piece * Copies::chunk();
        step_bytes = Copies::step * rows.stride;
        target = first_stage.address(Copies::row(), Copies::chunk());
        left = rows.bytes - piece * Copies::chunk();
        if (left <= 0) there = 0;
    }

    __device__ void copy(int i, uint32_t stage_offset) {
        const uint32_t address = Tile::moved(target + stage_offset, i * Copies::step, 0);
        const bool present = i < there;
        if constexpr (piece == 16) ptx::cp_async_cg_16_if(present, address, source);
        else ptx::cp_async_ca<piece>(address, source, present ? piece : 0);
        source += step_bytes;
    }
    __device__ void done() {
        source += piece * Copies::chunks - Copies::count * step_bytes;
        left -= piece * Copies::chunks;
        if (left <= 0) there = 0;
    }
};

// A block computes `rows` x `cols` of C, each of its warps `warp_rows` x `warp_cols`. `blocks` blocks share a
// multiprocessor.
template <int rows_, int cols_, int warp_rows_, int blocks_, int warp_cols_ = 64>
struct BlockShape {
    static constexpr int rows = rows_, cols = cols_, warp_rows = warp_rows_, warp_cols = warp_cols_, blocks = blocks_;
};
// The shape of a tile for operands of `bits` bits. Where two blocks of 128 x 128 share a multiprocessor, one multiplies
// while the other begins or ends; codes with scales leave no room for two.
template <int tile, int bits>
struct ShapeOf {
    using Shape = BlockShape<128, 256, 64, 1>;
};
template <int bits>
struct ShapeOf<64, bits> {   // a warp with 32 x 32 loads four fragments for eight MMAs, one with 16 x 64 five
    using Shape = std::conditional_t<bits == 16, BlockShape<64, 64, 32, 2, 32>, BlockShape<64, 64, 16, 2>>;
};
template <int bits>
struct ShapeOf<128, bits> {
    using Shape = std::conditional_t<bits == 16, BlockShape<128, 128, 64, 2>, BlockShape<128, 128, 32, 1>>;
};
template <int tile, int bits>
using TileShape = typename ShapeOf<tile, bits>::Shape;

template <class Shape_>
struct GemmShape : Shape_ {
    using Shape = Shape_;
    static constexpr int warp_columns = Shape::cols / Shape::warp_cols,
                         warps = Shape::rows / Shape::warp_rows * warp_columns;
    static constexpr int threads = 32 * warps, slices = Shape::warp_rows / 16, column_tiles = Shape::warp_cols / 8;
    // The system takes 1 KB beside the shared memory of each block.
    static constexpr int budget = (ptx::shared_bytes_per_block + 1024) / Shape::blocks - 1024;
    static constexpr bool roomy = ptx::shared_bytes_per_block > 128 * 1024;

    using Sums = tile::Accumulator[slices][column_tiles];
    // The epilogue's rows have 64 columns, whole blocks of any format even if a gated activation halves them: narrower
    // warps share their rows.
    using Staging = tile::AccumulatorStaging<64>;
    static constexpr int sharers = Staging::columns / Shape::warp_cols;
    static constexpr int staged = roomy || slices < 2 ? slices : 2;   // slices at once; others wait in registers

    // This warp's first row and column in the tile.
    __device__ static int warp_row() { return threadIdx.x / 32 / warp_columns * Shape::warp_rows; }
    __device__ static int warp_col() { return threadIdx.x / 32 % warp_columns * Shape::warp_cols; }
};

// The codes and scales of an operand. One array of scales serves the rows of all matrices: each matrix begins
// `scale_rows` rows behind the one before.
struct BlockRows : OperandRows {
    const uint8_t *scales;
    tile::ScalePlaces places;
    int64_t scale_rows, first_row;   // first_row: of the first matrix

    __device__ BlockRows(const uint8_t *codes, int64_t batch, int64_t row, int bytes, const uint8_t *scales, int blocks,
                         int swizzled, int scale_rows, int first_row)
        : OperandRows{codes, batch, row, bytes}, scales(scales), places{blocks, blocks, swizzled != 0},
          scale_rows(scale_rows), first_row(first_row) {}
};

// Values in f16, without scales.
struct Float16 {
    using Element = __half;
    static constexpr int bits = 16;
};

// The type of the MMA if an operand is expanded: f16 if both are f16, or NVFP4, whose products then stay exact;
// else bf16.
template <class FormatA, class FormatB>
struct Expanded {
    using Element = __nv_bfloat16;
    using Scale = tile::ExpandedMxToBf16;
};
template <>
struct Expanded<Float16, Float16> {
    using Element = __half;
};
template <>
struct Expanded<tile::Nvfp4, tile::Nvfp4> {
    using Element = __half;
    using Scale = tile::ExpandedNvToF16;
};
template <>
struct Expanded<tile::Bf16, tile::Nvfp4> {
    using Element = __nv_bfloat16;
    using Scale = tile::ExpandedNvToBf16;
};

// The scales of a slice: `words` words of four scales for each row. Lanes read the same word of 32 rows without bank
// conflicts.
template <int rows, int words>
struct ScaleWords {
    uint32_t word[words][rows];

    __device__ uint32_t byte(int row, int block) const {
        return reinterpret_cast<const uint8_t *>(&word[block / 4][row])[block % 4];
    }
};

// Copies scales into stages. cp.async copies aligned words without registers. Words of a slice that are not aligned, or
// in which a row ends, are loaded into registers and stored later. Scales past the end of a row become 0. `thread` of
// `threads` copies one word of every `step_rows`-th row.
template <int rows_, int words, int threads>
struct ScaleCopies {
    static_assert(threads % words == 0, "a thread keeps its word of a row");
    static constexpr int items = ceil_div(rows_ * words, threads), step_rows = threads / words;
    using Stage = ScaleWords<rows_, words>;
    const uint8_t *source[items];
    uint32_t *first;   // word of the first stage; `target` is its address in shared memory
    uint32_t target;
    int step, left;                 // bytes from slice to slice; scales from the next slice to the end of a row
    int word, there;                // this thread's word of a row, and its items
    uint32_t bytes[items][4];       // scales in flight through registers
    bool aligned, loaded = false;   // loaded: `bytes` are those of the slice before

    template <class RowOf>
    __device__ ScaleCopies(Stage &first_stage, const BlockRows &operand, int matrix, int thread, RowOf &&row_of)
        : word(thread % words) {
        const tile::ScalePlaces &places = operand.places;
        const int row = thread / words;
#pragma unroll
        for (int i = 0; i < items; ++i) {
            const int here = row_of(min(row + i * step_rows, rows_ - 1));
            source[i] = operand.scales + places.at(operand.first_row + matrix * operand.scale_rows + here, 4 * word);
        }
        first = &first_stage.word[word][row];
        target = static_cast<uint32_t>(__cvta_generic_to_shared(first));
        aligned = places.swizzled || (reinterpret_cast<uintptr_t>(operand.scales) | places.stride) % 4 == 0;
        step = words * (places.swizzled ? tile::scale_tile_bytes : 4);
        left = places.blocks;
        there = ceil_div(max(rows_ - row, 0), step_rows);
    }

    // For each slice in order: copy(), and if either this slice or the one before is not whole, store() and load();
    // then done(). Whether a slice is whole is the same for the block.
    __device__ bool whole() const { return aligned && left >= 4 * words; }

    // Starts copying the scales of a whole slice. They belong to the open group of copies.
    __device__ void copy(uint32_t stage_offset) {
#pragma unroll
        for (int i = 0; i < items; ++i)
            ptx::cp_async_ca_if<4>(whole() && (rows_ * words % threads == 0 || i < there),
                                   target + stage_offset + 4 * i * step_rows, source[i]);
    }
    // Loads those of another slice.
    __device__ void load() {
        loaded = !whole();
        if (!loaded) return;
#pragma unroll
        for (int i = 0; i < items; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) bytes[i][j] = 4 * word + j < left ? __ldg(source[i] + j) : 0;
    }
    // Stores what was loaded.
    __device__ void store(uint32_t stage_offset) {
        if (!loaded) return;
#pragma unroll
        for (int i = 0; i < items; ++i)
            if (rows_ * words % threads == 0 || i < there)
                first[stage_offset / 4 + i * step_rows] =
                    bytes[i][0] | bytes[i][1] << 8 | bytes[i][2] << 16 | bytes[i][3] << 24;
    }
    __device__ void done() {
#pragma unroll
        for (int i = 0; i < items; ++i) source[i] += step;
        left -= 4 * words;
    }
};

// The depth of a slice, as words of scales for each row, and as bytes.
template <class Format>
constexpr int slice_words = 0;
template <>
constexpr int slice_words<tile::Mxfp8> = 1;
template <>
constexpr int slice_words<tile::Mxfp4> = 1;
template <>
constexpr int slice_words<tile::Nvfp4> = 2;
template <class Format>
constexpr int slice_bytes = Format::bits == 8 ? 128 : 64;

// Replaces ScaleCopies for operands without scales.
struct NoScales {
    static constexpr bool loaded = false;
    __device__ bool whole() const { return true; }
    __device__ void copy(uint32_t) {}
    __device__ void load() {}
    __device__ void store(uint32_t) {}
    __device__ void done() {}
};

template <class Stage, int rows, int words, int threads>
__device__ inline NoScales scale_copies(Stage &, const OperandRows &, int, auto &&) {
    return {};
}
template <class Stage, int rows, int words, int threads>
__device__ inline auto scale_copies(Stage &first_stage, const BlockRows &operand, int matrix, auto &&row_of) {
    return ScaleCopies<rows, words, threads>(first_stage, operand, matrix, threadIdx.x, row_of);
}

// Whether B is e2m1 and A has 8 bits: then the codes of B take a byte each.
template <class FormatA, class FormatB>
constexpr bool is_contained = FormatA::bits == 8 && FormatB::bits == 4;

// Pairs of formats that one MMA multiplies.
template <class FormatA, class FormatB>
constexpr bool has_mma = std::is_same_v<FormatA, FormatB>;
template <>
constexpr bool has_mma<tile::Mxfp8, tile::Mxfp4> = true;

// c += A B of one step: 32 bytes of a row of A. The scales of A's rows are in thread pair `slice` % 2 of their word,
// those of B's columns in thread `column` % 4.
template <class FormatA, class FormatB, int step, int slice, int column>
__device__ inline void multiply_step(tile::Accumulator &c, const tile::FragmentA &a, const tile::FragmentB &b,
                                     uint32_t scale_a, uint32_t scale_b) {
    constexpr int thread_a = slice % 2, thread_b = column % 4;
    if constexpr (FormatA::bits == 16) {
        tile::multiply(c, a, b, typename FormatA::Element{});
    } else if constexpr (FormatA::bits == 8) {
        using CodesB = std::conditional_t<FormatB::bits == 8, ptx::E4m3, ptx::E2m1>;
        ptx::mma_m16n8k32_mxf8f6f4<ptx::E4m3, CodesB, step % 4, thread_a, step % 4, thread_b>(c, a, b, scale_a,
                                                                                              scale_b);
    } else if constexpr (FormatA::block == 32) {
        ptx::mma_m16n8k64_mxf4<2 * (step % 2), thread_a, 2 * (step % 2), thread_b>(c, a, b, scale_a, scale_b);
    } else {
        ptx::mma_m16n8k64_mxf4nvf4<thread_a, thread_b>(c, a, b, scale_a, scale_b);
    }
}

// The type of values in 16 bits.
template <class Format>
struct ElementOf {
    using Element = void;
};
template <class Format>
    requires(Format::bits == 16)
struct ElementOf<Format> {
    using Element = typename Format::Element;
};

// A core for a pair of formats that an MMA multiplies directly.
template <class FormatA, class FormatB, int tile_>
struct StraightCore : GemmShape<TileShape<tile_, FormatA::bits>> {
    using Shape = GemmShape<TileShape<tile_, FormatA::bits>>;
    static_assert(has_mma<FormatA, FormatB> && slice_words<FormatA> == slice_words<FormatB>);
    static constexpr bool scaled = FormatA::bits < 16, contained = is_contained<FormatA, FormatB>;
    static constexpr int row_bytes = !scaled && (tile_ == 64 || Shape::roomy) ? 128 : slice_bytes<FormatA>,
                         steps = row_bytes / 32;
    static constexpr int words = slice_words<FormatA>;
    using TileA = tile::SharedTile<Shape::rows, row_bytes>;
    using TileB = tile::SharedTile<Shape::cols, row_bytes>;
    using Rows = std::conditional_t<scaled, BlockRows, OperandRows>;
    struct Scales {
        ScaleWords<Shape::rows, words> a;
        ScaleWords<Shape::cols, words> b;
    };
    struct NoWords {
        NoScales a, b;
    };
    struct alignas(128) Stage {   // as the epilogue's rows, which are staged over it
        TileA tile_a;
        TileB tile_b;
        std::conditional_t<scaled, Scales, NoWords> scales;
    };
    static constexpr int fitting = Shape::budget / int(sizeof(Stage)), stages = fitting < 6 ? fitting : 6;
    static_assert(stages >= 2);
    // A block without scales walks over several tiles if one stage holds sums of all its warps: the first slices of the
    // next tile are copied to the other stages meanwhile.
    static constexpr int stagings = Shape::warps / Shape::sharers,
                         room = int(sizeof(Stage)) / int(stagings * sizeof(typename Shape::Staging));
    static constexpr bool walks = !scaled && room > 0;
    static_assert(walks || scaled);
    // With large tiles few warps share a multiprocessor, and each instruction between their MMAs costs a cycle or two:
    // registers are spent on addresses, and the place of the tile waits in shared memory.
    static constexpr bool sparing = walks && Shape::roomy && tile_ == 128;
    using Element = typename ElementOf<FormatA>::Element;
    static constexpr int staged = !walks ? Shape::staged : room < Shape::slices ? room : Shape::slices;
    // If a block has only 16 rows, its warps can divide the columns instead.
    static constexpr bool divides_columns = walks && Shape::cols == 16 * Shape::warps;
    static_assert((Shape::sharers == 1 && !divides_columns) || staged == Shape::slices, "warps wait for others once");
    __device__ static bool has_few_rows(const TilePlace &place) {
        return divides_columns && place.end_row - place.first_row <= 16;
    }
    using WarpStaging = typename Shape::Staging[staged];
    struct Stages {
        union {
            Stage stage[stages];
            WarpStaging staging[stagings];
        };
    };
    struct StagesAndPlace : Stages {
        TilePlace place;
    };
    using Shared = std::conditional_t<sparing, StagesAndPlace, Stages>;

    // Calls begin(first_col) and finish(sums, staging, first_col) for each tile of the block, with this warp's sums and
    // staging. Fragments are loaded one step ahead of their MMAs, also from the next slice.
    template <class Begin, class Finish>
    __device__ static void multiply(Shared &shared, const Rows &a, const Rows &b, const GemmOptions &options,
                                    const TilePlace &place, Begin &&begin, Finish &&finish) {
        // The copies of this thread.
        GatheredRows<TileA, Shape::threads, !scaled> rows_a(shared.stage[0].tile_a, a, options, place);
        ConsecutiveRows<TileB, Shape::threads, contained ? 8 : 16> rows_b(shared.stage[0].tile_b, b, place.group,
                                                                          place.first_col, options.cols);
        const int slices = ceil_div(a.bytes, row_bytes);
        constexpr int copies_a = decltype(rows_a)::count, copies = copies_a + decltype(rows_b)::count;
        uint32_t filled = 0;   // offset of the stage to fill next
        const auto row_a = [&](int row) { return row_of_a(options, place, row); };
        const auto row_b = [&](int row) { return min(place.first_col + row, options.cols - 1); };
        auto scales_a = scale_copies<decltype(Stage::scales.a), Shape::rows, words, Shape::threads>(
            shared.stage[0].scales.a, a, place.matrix, row_a);
        auto scales_b = scale_copies<decltype(Stage::scales.b), Shape::cols, words, Shape::threads>(
            shared.stage[0].scales.b, b, place.group, row_b);
        const int end_col = min(place.first_col + place.tiles * Shape::cols, options.cols);
        int copied_col = place.first_col, uncopied = slices;   // of the tile that is copied: its place, slices to copy
        auto copy_next_tile = [&] {
            uncopied = slices;
            if ((copied_col += Shape::cols) >= end_col) return;
            rows_a.rewind(slices);
            rows_b = {shared.stage[0].tile_b, b, place.group, copied_col, options.cols};
        };
        const auto before = [](uint32_t offset) {   // the stage before the one at `offset`
            return offset == 0 ? (stages - 1) * uint32_t(sizeof(Stage)) : offset - uint32_t(sizeof(Stage));
        };
        // Scales that pass through registers are stored one slice later; with two stages, before that slice is read.
        // One branch serves all rare cases.
        auto copy_scales = [&] {
            const bool all_whole = scales_a.whole() & scales_b.whole();
            scales_a.copy(filled), scales_b.copy(filled);
            if (!all_whole | scales_a.loaded | scales_b.loaded) [[unlikely]] {
                if (stages > 2) scales_a.store(before(filled)), scales_b.store(before(filled));
                scales_a.load(), scales_b.load();
            }
            scales_a.done(), scales_b.done();
        };
        // Copies the next slice in parts, to be issued between MMAs. Behind the last slice of the last tile it copies
        // zeros, which are not read.
        auto copy_part = [&](int part, int parts) {
            if (part == 0) copy_scales();
#pragma unroll
            for (int i = part * copies / parts; i < (part + 1) * copies / parts; ++i) {
                if (i < copies_a) rows_a.copy(i, filled);
                else rows_b.copy(i - copies_a, filled);
            }
            if (part == parts - 1) rows_a.done(), rows_b.done();
        };
        auto finish_copy = [&] {
            if (stages == 2 && (scales_a.loaded | scales_b.loaded)) [[unlikely]]
                scales_a.store(filled), scales_b.store(filled);
            filled = filled == (stages - 1) * sizeof(Stage) ? 0 : filled + sizeof(Stage);
            ptx::cp_async_commit_group();
        };
        // Fill all stages but one.
#pragma unroll 1
        for (int i = 0; i < stages - 1; ++i, --uncopied) {
            if (walks && uncopied == 0) copy_next_tile();
            copy_part(0, 1), finish_copy();
        }

        // Fragments and scales of two steps: one is multiplied while the other is loaded.
        const bool few = has_few_rows(place);
        const int warp_row = few ? 0 : Shape::warp_row(), warp_col = few ? threadIdx.x / 32 * 16 : Shape::warp_col();
        const uint32_t address_a = tile::address_a(shared.stage[0].tile_a) + warp_row * row_bytes;
        const uint32_t address_b = tile::address_b(shared.stage[0].tile_b) + warp_col * row_bytes;
        uint32_t step_a[steps], step_b[steps];   // those of each step
        if constexpr (sparing) {
#pragma unroll
            for (int i = 0; i < steps; ++i)
                step_a[i] = TileA::moved(address_a, 0, 2 * i), step_b[i] = TileB::moved(address_b, 0, 2 * i);
        }
        constexpr int pairs = Shape::column_tiles / 2;   // of neighbouring column tiles
        tile::FragmentA of_a[2][Shape::slices];
        // In 16 bits all of B of a step; with scales, two pairs.
        tile::FragmentB of_b[scaled ? 1 : 2][scaled ? 2 : pairs][2];
        // A register holds the scale words of two slices of rows, or of four column tiles, for a step or a whole slice.
        constexpr int registers_a = ceil_div(Shape::slices, 2), registers_b = Shape::column_tiles / 4;
        uint32_t scale_a[2][registers_a] = {}, scale_b[2][registers_b] = {};
        auto scale_set = [](int step) { return words == 2 ? step % 2 : step / steps % 2; };
        auto load_slice_a = [&](int step, int i, uint32_t offset) {
            if constexpr (sparing) tile::load_a<TileA>(of_a[step % 2][i], step_a[step % steps] + offset, 16 * i, 0);
            else tile::load_a<TileA>(of_a[step % 2][i], address_a + offset, 16 * i, 2 * (step % steps));
        };
        auto load_a = [&](int step, uint32_t offset) {
#pragma unroll
            for (int i = 0; i < Shape::slices; ++i) load_slice_a(step, i, offset);
            if constexpr (scaled) {
                if (words == 2 || step % steps == 0) {
                    const char *const first = reinterpret_cast<const char *>(&shared);
                    const Scales &scales = reinterpret_cast<const Stage &>(first[offset]).scales;
                    const int row = tile::scale_word_row(), word = words == 2 ? step % steps : 0;
                    const int set = scale_set(step);
#pragma unroll
                    for (int i = 0; i < registers_a; ++i) {
                        const int last = Shape::slices == 1 ? tile::scale_row() : row;
                        scale_a[set][i] = scales.a.word[word][Shape::warp_row() + 32 * i + last];
                    }
#pragma unroll
                    for (int i = 0; i < registers_b; ++i)
                        scale_b[set][i] = scales.b.word[word][Shape::warp_col() + 32 * i + row];
                }
            }
        };
        auto load_b = [&](int step, int pair, uint32_t offset) {
            if constexpr (contained)
                tile::load_contained_b<TileB>(of_b[0][pair % 2], address_b + offset, 16 * pair, 2 * (step % steps));
            else if constexpr (scaled)
                tile::load_b<TileB>(of_b[0][pair % 2], address_b + offset, 16 * pair, 2 * (step % steps));
            else if constexpr (sparing)
                tile::load_b<TileB>(of_b[step % 2][pair], step_b[step % steps] + offset, 16 * pair, 0);
            else tile::load_b<TileB>(of_b[step % 2][pair], address_b + offset, 16 * pair, 2 * (step % steps));
        };
        uint32_t offset = 0;   // of the stage that is multiplied
        auto next_slice = [&] {
            finish_copy();
            ptx::cp_async_wait_group<stages - 2>();
            ptx::bar_sync();   // all threads see the next slice and have loaded this one
            offset = offset == (stages - 1) * sizeof(Stage) ? 0 : offset + sizeof(Stage);
        };
        // Copies that follow each other: the compiler puts three dead loads before each copy behind a load of
        // fragments. With two stages, they must start early. Few MMAs hide the copies of a step at a time.
        constexpr int spacing = Shape::slices > 1 || stages == 2 ? 1 : pairs, parts = spacing == 1 ? 4 : steps;
        // In 16 bits all fragments of a step are loaded during the step before, one for each four MMAs, and a slice is
        // copied during all steps but the last, before which the next slice is awaited. Where instructions count, it is
        // copied in fewer parts, with fewer dead loads.
        constexpr int early = sparing ? 2 : steps - 1;
        // Copies of a later slice, over the one before this one, and loads of the next fragments are issued between the
        // MMAs.
        auto multiply_slice = [&](typename Shape::Sums &sums) {
            static_for<steps>([&](auto step) {
                if constexpr (!scaled && step + 1 == steps) next_slice();
                static_for<pairs>([&](auto pair) {
                    constexpr int turn = step * pairs + pair;
                    if constexpr (!scaled) {   // the next step, behind the last slice without use
                        if constexpr (pair == 0 && step < early) copy_part(step, early);
#pragma unroll
                        for (int i = pair * Shape::slices / pairs; i < (pair + 1) * Shape::slices / pairs; ++i)
                            load_slice_a(step + 1, i, offset);
                        load_b(step + 1, pair, offset);
                    } else if constexpr (turn % spacing == 0 && turn / spacing < parts)
                        copy_part(turn / spacing, parts);
                    if constexpr (!scaled) {
                    } else if constexpr (pair + 1 < pairs) {
                        load_b(step, pair + 1, offset);
                    } else {   // behind the last slice: fragments that are not used
                        if constexpr (step + 1 == steps) next_slice();
                        load_a(step + 1, offset);
                        load_b(step + 1, 0, offset);
                    }
                    // Selectors need uniform registers: MMAs with equal selectors follow each other.
                    static_for<2>([&](auto half) {
                        static_for<Shape::slices>([&](auto n) {
                            constexpr int column = 2 * pair + half, some = Shape::slices / 2;
                            constexpr int i = Shape::slices == 1 ? 0 : n % some * 2 + (n / some + half) % 2;
                            multiply_step<FormatA, FormatB, step, i, column>(
                                sums[i][column], of_a[step % 2][i],
                                of_b[scaled ? 0 : step % 2][scaled ? pair % 2 : pair][half],
                                scale_a[scale_set(step)][i / 2], scale_b[scale_set(step)][column / 4]);
                        });
                    });
                });
            });
            if constexpr (scaled && words == 1) {   // set 1 holds the scales of the next slice
#pragma unroll
                for (int i = 0; i < registers_a; ++i) scale_a[0][i] = scale_a[1][i];
#pragma unroll
                for (int i = 0; i < registers_b; ++i) scale_b[0][i] = scale_b[1][i];
            }
        };
        // The same for this warp's pair of columns.
        auto multiply_pair = [&](typename Shape::Sums &sums) {
            static_for<steps>([&](auto step) {
                copy_part(step, steps);
                if constexpr (step + 1 == steps) next_slice();
                load_slice_a(step + 1, 0, offset);
                load_b(step + 1, 0, offset);
                static_for<2>([&](auto half) {
                    multiply_step<FormatA, FormatB, step, 0, half>(sums[0][half], of_a[step % 2][0],
                                                                   of_b[scaled ? 0 : step % 2][0][half], 0, 0);
                });
            });
        };
#pragma unroll 1
        for (int first_col = place.first_col;; first_col += Shape::cols) {   // all tiles
            begin(first_col);
            typename Shape::Sums sums = {};
            // The fragments of the first step.
            ptx::cp_async_wait_group<stages - 2>();
            ptx::bar_sync();   // all threads see the first slice and have read their staging
            load_a(0, offset);
#pragma unroll
            for (int pair = 0; pair < (scaled ? 1 : pairs); ++pair)
                if (pair == 0 || !divides_columns || !few) load_b(0, pair, offset);
            // All slices, and those up to the end of the tile that is copied at once.
#pragma unroll 1
            for (int left = slices; left > 0;) {
                if (walks && uncopied == 0) copy_next_tile();
                const int some = walks ? min(left, uncopied) : left;
                left -= some, uncopied -= some;
                if (divides_columns && few) {
#pragma unroll 1
                    for (int slice = 0; slice < some; ++slice) multiply_pair(sums);
                } else {
#pragma unroll 1
                    for (int slice = 0; slice < some; ++slice) multiply_slice(sums);
                }
            }
            if constexpr (walks) {   // the stage that was read last is free
                finish(sums, reinterpret_cast<WarpStaging *>(reinterpret_cast<char *>(&shared) + filled), first_col);
                if (first_col + Shape::cols >= end_col) break;
            } else {
                ptx::cp_async_wait_group<0>();
                ptx::bar_sync();   // all threads have read the stages, which the sums overwrite
                finish(sums, shared.staging, first_col);
                break;
            }
        }
    }
};

// An operand in the slices of an expanding core: 128 values of each row, as codes with scales or in 16 bits.
template <class Format, int rows>
struct RawTile {
    static constexpr int words = slice_words<Format>;
    tile::SharedTile<rows, 128 * Format::bits / 8> codes;
    ScaleWords<rows, words> scales;
};
template <class Format, int rows>
    requires(Format::bits == 16)
struct RawTile<Format, rows> {
    static constexpr int words = 0;
    tile::SharedTile<rows, 256> codes;
    NoScales scales;
};

// The shape of a block that expands operands. With little shared memory the large tile shrinks, so that two slices fit.
template <class FormatA, class FormatB, int tile>
using ExpandingShape = std::conditional_t<
    tile == 64 || ptx::shared_bytes_per_block >= 128 * 1024,
    TileShape<tile, (FormatA::bits < FormatB::bits ? FormatA::bits : FormatB::bits)>,
    std::conditional_t<FormatA::bits + FormatB::bits <= 20, BlockShape<128, 128, 64, 2>, BlockShape<128, 64, 32, 2>>>;

// A core that expands one operand or both to 16 bits, once per block, for MMAs that every target has. Products of codes
// times scales stay exact. With little shared memory a block works on half a slice at a time.
template <class FormatA_, class FormatB_, int tile_>
struct ExpandingCore : GemmShape<ExpandingShape<FormatA_, FormatB_, tile_>> {
    using Shape = GemmShape<ExpandingShape<FormatA_, FormatB_, tile_>>;
    using FormatA = FormatA_;
    using FormatB = FormatB_;
    static constexpr bool expands_a = FormatA::bits < 16, expands_b = FormatB::bits < 16;
    using To = Expanded<FormatA, FormatB>;
    static constexpr int blocks = Shape::roomy ? Shape::blocks : 1, budget = ptx::shared_bytes_per_block / blocks;
    static constexpr int depth = Shape::roomy ? 128 : 64, halves = 128 / depth, steps = depth / 16;
    using RawA = RawTile<FormatA, Shape::rows>;
    using RawB = RawTile<FormatB, Shape::cols>;
    using TileA = tile::SharedTile<Shape::rows, 2 * depth>;
    using TileB = tile::SharedTile<Shape::cols, 2 * depth>;
    struct Stage {
        RawA a;
        RawB b;
    };
    struct ExpandedA {
        TileA tile_a;
    };
    struct ExpandedB {
        TileB tile_b;
    };
    struct NoA {};
    struct NoB {};
    struct Expanded16 : std::conditional_t<expands_a, ExpandedA, NoA>, std::conditional_t<expands_b, ExpandedB, NoB> {};
    static constexpr int fitting = (budget - int(sizeof(Expanded16))) / int(sizeof(Stage)),
                         stages = fitting < 3 ? fitting : 3;
    static_assert(stages >= 2);
    struct Slices {
        Stage stage[stages];
        Expanded16 expanded;
    };
    static constexpr bool walks = false;
    __device__ static bool has_few_rows(const TilePlace &) { return false; }
    using WarpStaging = typename Shape::Staging[Shape::staged];
    struct Shared {
        union {
            Slices slices;
            WarpStaging staging[Shape::warps];
        };
    };
    using RowsA = std::conditional_t<expands_a, BlockRows, OperandRows>;
    using RowsB = std::conditional_t<expands_b, BlockRows, OperandRows>;

    // Calls begin(first_col) and finish(sums, staging, first_col) for the tile of the block, with this warp's sums and
    // staging.
    template <class Begin, class Finish>
    __device__ static void multiply(Shared &shared, const RowsA &a, const RowsB &b, const GemmOptions &options,
                                    const TilePlace &place, Begin &&begin, Finish &&finish) {
        // The copies of this thread.
        Stage *const stage = shared.slices.stage;
        GatheredRows<decltype(RawA::codes), Shape::threads> rows_a(stage[0].a.codes, a, options, place);
        ConsecutiveRows<decltype(RawB::codes), Shape::threads> rows_b(stage[0].b.codes, b, place.group, place.first_col,
                                                                      options.cols);
        const auto row_a = [&](int row) { return row_of_a(options, place, row); };
        const auto row_b = [&](int row) { return min(place.first_col + row, options.cols - 1); };
        auto scales_a = scale_copies<decltype(RawA::scales), Shape::rows, RawA::words, Shape::threads>(
            stage[0].a.scales, a, place.matrix, row_a);
        auto scales_b = scale_copies<decltype(RawB::scales), Shape::cols, RawB::words, Shape::threads>(
            stage[0].b.scales, b, place.group, row_b);
        const int slices = ceil_div(expands_a ? b_depth(a) : a.bytes / 2, 128);
        int copied = 0;
        auto copy = [&] {   // the next slice
            if (copied < slices) {
                const uint32_t offset = copied % stages * sizeof(Stage);
#pragma unroll
                for (int i = 0; i < decltype(rows_a)::count; ++i) rows_a.copy(i, offset);
#pragma unroll
                for (int i = 0; i < decltype(rows_b)::count; ++i) rows_b.copy(i, offset);
                rows_a.done(), rows_b.done();
                scales_a.copy(offset), scales_b.copy(offset);
                scales_a.load(), scales_b.load();
                scales_a.done(), scales_b.done();
            }
            ptx::cp_async_commit_group();
        };
        auto finish_copy = [&] {
            const uint32_t offset = copied % stages * sizeof(Stage);
            if (copied < slices) scales_a.store(offset), scales_b.store(offset);
            ++copied;
        };
        // Fill all stages but one.
#pragma unroll
        for (int i = 0; i < stages - 1; ++i) copy(), finish_copy();
        begin(place.first_col);

        // All slices: expand each, then multiply it.
        typename Shape::Sums sums = {};
#pragma unroll 1
        for (int slice = 0; slice < slices; ++slice) {
            ptx::cp_async_wait_group<stages - 2>();
            ptx::bar_sync();   // all threads see this slice and have read the one before
            copy();
            const Stage &here = stage[slice % stages];
#pragma unroll
            for (int half = 0; half < halves; ++half) {
                if (half > 0) ptx::bar_sync();   // all threads have read the first half
                if constexpr (expands_a) expand<FormatA>(shared.slices.expanded.tile_a, here.a, half);
                if constexpr (expands_b) expand<FormatB>(shared.slices.expanded.tile_b, here.b, half);
                ptx::bar_sync();   // all threads see the expanded slice
                if constexpr (expands_a && expands_b)
                    multiply_slice(sums, shared.slices.expanded.tile_a, 0, shared.slices.expanded.tile_b, 0);
                else if constexpr (expands_b)
                    multiply_slice(sums, here.a.codes, half * depth / 8, shared.slices.expanded.tile_b, 0);
                else multiply_slice(sums, shared.slices.expanded.tile_a, 0, here.b.codes, half * depth / 8);
            }
            finish_copy();
        }
        ptx::cp_async_wait_group<0>();
        ptx::bar_sync();   // all threads have read the stages, which the sums overwrite
        finish(sums, shared.staging, place.first_col);
    }

private:
    __device__ static int b_depth(const OperandRows &a) { return a.bytes * 8 / FormatA::bits; }

    // Part `half` of a slice, in natural order. By the whole block.
    template <class Format, class To16, class Raw>
    __device__ static void expand(To16 &to, const Raw &from, int half) {
        constexpr int chunks = depth * Format::bits / 128;
        tile::share_chunks<Shape::threads, To16::rows, chunks>([&](int row, int chunk) {
            const int source = half * chunks + chunk;
            tile::expand_naturally<Format, typename To::Scale>(
                to, row, chunk, from.codes.chunks[from.codes.index(row, source)],
                [&](int word) { return from.scales.byte(row, tile::block_of<Format>(source, word)); });
        });
    }

    // The MMAs of a slice, with A from chunk `first_a` on and B from chunk `first_b` on.
    template <class A, class B>
    __device__ static void multiply_slice(typename Shape::Sums &sums, const A &a, int first_a, const B &b,
                                          int first_b) {
        const uint32_t address_a = tile::address_a(a) + Shape::warp_row() * (16 * A::row_chunks);
        const uint32_t address_b = tile::address_b(b) + Shape::warp_col() * (16 * B::row_chunks);
#pragma unroll(depth == 128 ? 4 : steps)
        for (int step = 0; step < steps; ++step) {
            tile::FragmentA of_a[Shape::slices];
#pragma unroll
            for (int i = 0; i < Shape::slices; ++i) tile::load_a<A>(of_a[i], address_a, 16 * i, first_a + 2 * step);
#pragma unroll
            for (int pair = 0; pair < Shape::column_tiles / 2; ++pair) {
                tile::FragmentB of_b[2];
                tile::load_b<B>(of_b, address_b, 16 * pair, first_b + 2 * step);
#pragma unroll
                for (int i = 0; i < Shape::slices; ++i)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        tile::multiply(sums[i][2 * pair + half], of_a[i], of_b[half], typename To::Element{});
            }
        }
    }
};

// The core of a pair of formats: straight if the target has an MMA for them.
template <class FormatA, class FormatB, int tile, bool straight>
struct CoreOf {
    using Core = ExpandingCore<FormatA, FormatB, tile>;
};
template <class FormatA, class FormatB, int tile>
struct CoreOf<FormatA, FormatB, tile, true> {
    using Core = StraightCore<FormatA, FormatB, tile>;
};
template <class FormatA, class FormatB, int tile>
using Core =
    typename CoreOf<FormatA, FormatB, tile, has_mma<FormatA, FormatB> && tile::needs_no_expansion<FormatA>>::Core;

// C of one block's tiles, from a place on.
template <class Core, class A, class B>
__device__ __forceinline__ void gemm_at(const TilePlace &place, typename Core::Shared &shared, const A &a, const B &b,
                                        const GemmOptions &options) {
    if (place.fills) fill_scale_tiles(options.epilogue, options.rows, place.first_col, place.tiles * Core::cols);
    if (!place.there) return;
    const int row = place.first_row + Core::warp_row();
    // The residual is on its way while the tile is multiplied.
    const auto begin = [&](int first_col) {
        prefetch_residual(options.epilogue, place.matrix, row, min(row + Core::warp_rows, place.end_row),
                          first_col + Core::warp_col(), Core::warp_cols);
    };
    // The epilogue, `staged` slices at a time by way of shared memory.
    Core::multiply(shared, a, b, options, place, begin, [&](auto &sums, auto *of_warps, int first_col) {
        const Epilogue epilogue(options.epilogue, ptx::mov_b32(place.matrix), ptx::mov_b32(place.group), options.rows,
                                options.cols);
        const int warp = threadIdx.x / 32, col = first_col + Core::warp_col();
        const bool few = Core::has_few_rows(place);
        constexpr int sharers = Core::sharers;
        const int sharer = few ? warp : warp % sharers;
        auto &staging = of_warps[few ? 0 : warp / sharers];
        constexpr int staged = sizeof(staging) / sizeof(staging[0]);
        // In 16 bits sums are activated where they are, and mostly stored without a detour by float32: all warps of the
        // block take the same way, because some wait for each other on the other one.
        constexpr bool activated = Core::walks;
        Epilogue::LaneBias bias;
        if constexpr (activated) {
            epilogue.activate_sums(sums, few ? first_col + 16 * warp : col);
            using Element = typename Core::Element;
            using PairStaging = tile::PairStaging<Core::warp_cols>;
            constexpr int room = sizeof(staging) / sharers / sizeof(PairStaging),
                          pairs = room < Core::slices ? room : Core::slices;
            if (!few && epilogue.stores_rows(first_col, Core::cols, Element{})) {
                auto *const of_warp = reinterpret_cast<PairStaging *>(&staging) + warp % sharers * room;
                epilogue.store_rows(reinterpret_cast<PairStaging(&)[pairs]>(*of_warp), sums, row, place.end_row, col,
                                    Element{});
                return;
            }
        } else {
            bias = epilogue.lane_bias<typename Core::Staging>(col);
        }
#pragma unroll 1   // an epilogue is long: one copy of its code
        for (int slice = 0; slice < Core::slices; slice += staged) {
            if (few) {   // the warps share the rows
                staging[0].template put<2>(sums[0], 16 * warp);
                ptx::bar_sync();   // all warps see the sums
            } else {
#pragma unroll
                for (int i = 0; i < staged; ++i)
                    staging[i].template put<Core::column_tiles>(sums[i], sharer * Core::warp_cols);
                if (sharers > 1) ptx::bar_sync();   // both warps see the rows
            }
#pragma unroll
            for (int i = staged; i < Core::slices; ++i)   // move the others down: all indices stay constants
#pragma unroll
                for (int j = 0; j < Core::column_tiles; ++j)
#pragma unroll
                    for (int k = 0; k < 4; ++k) sums[i - staged][j][k] = sums[i][j][k];
#pragma unroll 1
            for (int i = 0; i < (few ? 1 : staged); ++i)
                epilogue.finish<activated>(staging[i], few ? place.first_row : row + 16 * (slice + i), place.end_row,
                                           few ? first_col : col - sharer * Core::warp_cols, bias, sharer,
                                           few ? Core::warps : sharers);
        }
    });
}

// C of one block's tiles.
template <class Core, class A, class B>
__device__ __forceinline__ void gemm(const A &a, const B &b, const GemmOptions &options) {
    typename Core::Shared &shared = ::shared<typename Core::Shared>();
    const TilePlace place = TilePlace::of_block<Core::rows, Core::cols, Core::walks>(options);
    if constexpr (requires { shared.place; }) {
        if (threadIdx.x == 0) shared.place = place;
        ptx::bar_sync();   // all threads see it
        gemm_at<Core>(shared.place, shared, a, b, options);
    } else {
        gemm_at<Core>(place, shared, a, b, options);
    }
}

// Rows of `depth` elements of 16 bits. Strides are in elements.
template <class Element>
__device__ inline OperandRows rows_in_16_bits(const Element *data, int64_t batch, int64_t row, int depth) {
    static_assert(sizeof(Element) == 2);
    return {reinterpret_cast<const uint8_t *>(data), 2 * batch, 2 * row, 2 * depth};
}

}   // namespace op

// The parameters and the body of every entry, behind KERNEL(). arrays, axes and strides are the parameters of the
// operands, in parentheses; axes declare batch, tokens, groups and cols. operand_a, operand_b, level_a and level_b are
// the operands and their global scales, made of these parameters. The last argument is the function that computes C.
// clang-format off
#define GEMM_ENTRY(arrays, axes, strides, operand_a, operand_b, level_a, level_b, ...)                                 \
    (WITHOUT_PARENTHESES arrays,                                                                                       \
     const float *bias_f32, const __half *bias_f16, const __nv_bfloat16 *bias_bf16, /* [groups, cols] */               \
     const float *residual_f32, const __half *residual_f16, const __nv_bfloat16 *residual_bf16,                        \
     const float *alphas,     /* [alpha_count] */                                                                      \
     const float *out_global, /* [level_count] */                                                                      \
     const int *group_starts, /* [starts] */                                                                           \
     const int *order,        /* [rows] */                                                                             \
     float *out_f32, __half *out_f16, __nv_bfloat16 *out_bf16, /* [batch, rows, width], as the residual */             \
     uint8_t *codes,          /* [batch rows, code_bytes] */                                                           \
     uint8_t *scales,         /* [scale_bytes] */                                                                      \
     float alpha, int activation, float limit, float gate_alpha, float offset, int ending, int rule, int swizzled,     \
     int in_place, int least_rows, int most_rows, WITHOUT_PARENTHESES axes, int rows, int width, int alpha_count,      \
     int level_count, int starts, int code_bytes, int scale_bytes, WITHOUT_PARENTHESES strides,                        \
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
             codes, scales, alphas, level_a, level_b, out_global, alpha, limit, gate_alpha, offset, activation,        \
             ending, rule, swizzled, in_place, alpha_count, level_count, width, code_bytes},                           \
            group_starts, order, batch, tokens, rows, cols, groups, least_rows, most_rows});                           \
    }

// Both operands in 16 bits; both in codes and scales; A in bf16 and B in codes and scales.
#define GEMM_IN_16_BITS(Element, ...)                                                                                  \
    GEMM_ENTRY((const Element *a,        /* [batch, tokens, depth] */                                                  \
                const Element *b),       /* [groups, cols, depth] */                                                   \
               (int batch, int tokens, int depth, int groups, int cols),                                               \
               (long long a_batch, long long a_row, long long b_group, long long b_row),                               \
               op::rows_in_16_bits(a, a_batch, a_row, depth), op::rows_in_16_bits(b, b_group, b_row, depth),           \
               nullptr, nullptr, __VA_ARGS__)
#define GEMM_IN_BLOCKS(...)                                                                                            \
    GEMM_ENTRY((const uint8_t *a_codes,  /* [batch, tokens, a_bytes] */                                                \
                const uint8_t *a_scales, /* [a_scale_bytes] */                                                         \
                const uint8_t *b_codes,  /* [groups, cols, b_bytes] */                                                 \
                const uint8_t *b_scales, /* [b_scale_bytes] */                                                         \
                const float *a_global, const float *b_global), /* [1] or null */                                       \
               (int a_blocks, int a_swizzled, int a_scale_rows, int a_first_row,                                       \
                int b_blocks, int b_swizzled, int b_scale_rows, int b_first_row,                                       \
                int batch, int tokens, int a_bytes, long long a_scale_bytes,                                           \
                int groups, int cols, int b_bytes, long long b_scale_bytes),                                           \
               (long long a_batch, long long a_row, long long b_group, long long b_row),                               \
               op::BlockRows(a_codes, a_batch, a_row, a_bytes, a_scales, a_blocks, a_swizzled, a_scale_rows,           \
                             a_first_row),                                                                             \
               op::BlockRows(b_codes, b_group, b_row, b_bytes, b_scales, b_blocks, b_swizzled, b_scale_rows,           \
                             b_first_row),                                                                             \
               a_global, b_global, __VA_ARGS__)
#define GEMM_OF_BF16_AND_BLOCKS(...)                                                                                   \
    GEMM_ENTRY((const __nv_bfloat16 *a,  /* [batch, tokens, depth] */                                                  \
                const uint8_t *b_codes,  /* [groups, cols, b_bytes] */                                                 \
                const uint8_t *b_scales, /* [b_scale_bytes] */                                                         \
                const float *b_global), /* [1] or null */                                                              \
               (int b_blocks, int b_swizzled, int b_scale_rows, int b_first_row,                                       \
                int batch, int tokens, int depth, int groups, int cols, int b_bytes, long long b_scale_bytes),         \
               (long long a_batch, long long a_row, long long b_group, long long b_row),                               \
               op::rows_in_16_bits(a, a_batch, a_row, depth),                                                          \
               op::BlockRows(b_codes, b_group, b_row, b_bytes, b_scales, b_blocks, b_swizzled, b_scale_rows,           \
                             b_first_row),                                                                             \
               nullptr, b_global, __VA_ARGS__)
// clang-format on

// TILE_GEMM is an entry on whole tiles without its parameters and body; BLOCK_GEMM and HALF_GEMM are whole entries.
#define TILE_GEMM(name, Core_)                                                                                         \
    KERNEL(name, .threads = {Core_::threads}, .shared_bytes = sizeof(Core_::Shared),                                   \
           .tile = {Core_::cols, Core_::rows, 1}, .min_blocks = Core_::blocks)
#define BLOCK_GEMM(name, FormatA, FormatB, tile_)                                                                      \
    using Core = op::Core<FormatA, FormatB, tile_>;                                                                    \
    TILE_GEMM(name, Core) GEMM_IN_BLOCKS(op::gemm<Core>)
#define HALF_GEMM(name, FormatB, tile_)                                                                                \
    using Core = op::Core<tile::Bf16, FormatB, tile_>;                                                                 \
    TILE_GEMM(name, Core) GEMM_OF_BF16_AND_BLOCKS(op::gemm<Core>)
