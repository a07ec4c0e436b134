// Matrix products C = activation(alpha A B^T + bias) + residual on tensor cores, A [rows, depth] and B [cols, depth] as they lie.
//
// A block multiplies a tile of C: slices of A and B along the depth pass through stages in shared memory, which cp.async fills
// while others are multiplied. Sums are those of the tensor core in ascending k, in one float32 accumulator, so that no bit of C
// depends on the tile. How slices become operands of MMAs is a Core for each pair of formats.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernel.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/target.cuh"
#include "../tile/fragment.cuh"
#include "../tile/shared.cuh"
#include "../tile/staging.cuh"
#include "epilogue.cuh"

namespace op {

// What an entry is given beside its operands.
struct GemmOptions {
    EpilogueOptions epilogue;
    const int *group_starts;   // [groups + 1] or null: rows group_starts[g] to group_starts[g + 1] are multiplied by B of group g
    const int *order;          // [rows] or null: which row of A each row of C is made of
    int batch, tokens, rows, cols, depth, groups;
};

// Where an operand's rows are: `stride` bytes from row to row, `batch` from matrix to matrix, `bytes` of a row (a multiple of 16).
struct OperandRows {
    const uint8_t *data;
    int64_t batch, stride;
    int bytes;
};

// The tile of C that a block works on.
struct TilePlace {
    int matrix = 0, group = 0;   // of A and C; of B
    int first_row = 0, end_row = 0, first_col = 0;
    bool there = false;

    // Blocks that start one after the other take tiles of a few rows of tiles, column by column, so that what they read of A and
    // B meets in the L2. Of groups each begins with a tile of its own; a block that finds none leaves.
    template <int tile_rows, int tile_cols>
    __device__ static TilePlace of_block(const GemmOptions &options) {
        constexpr int band = 8;
        TilePlace place;
        const int linear = blockIdx.y * gridDim.x + blockIdx.x, of_band = band * gridDim.x;
        const int first = linear / of_band * band, height = min(int(gridDim.y) - first, band);
        int row_tile = first + linear % of_band % height;
        place.first_col = linear % of_band / height * tile_cols;
        place.matrix = place.group = blockIdx.z;
        place.end_row = options.rows;
        if (options.group_starts) {
            place.matrix = 0;
            int start = options.group_starts[0], end = start;
            for (place.group = 0; place.group < options.groups; ++place.group, start = end) {
                end = options.group_starts[place.group + 1];
                const int tiles = max(ceil_div(end - start, tile_rows), 0);
                if (row_tile < tiles) break;
                row_tile -= tiles;
            }
            if (place.group == options.groups) return place;
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

// Rows of A on their way into stages; they may be any rows. Rows past the end are the last one again, which nobody stores.
template <class Tile, int threads>
struct GatheredRows : ChunkCopies<Tile, threads> {
    using Copies = ChunkCopies<Tile, threads>;
    const uint8_t *source[Copies::count];
    uint32_t target;
    int left;   // bytes of a row from this thread's chunk on

    __device__ GatheredRows(const Tile &first_stage, const OperandRows &rows, const GemmOptions &options, const TilePlace &place) {
#pragma unroll
        for (int i = 0; i < Copies::count; ++i) {
            int row = min(place.first_row + Copies::row() + i * Copies::step, place.end_row - 1);
            if (options.order) row = options.order[row];
            source[i] = rows.data + place.matrix * rows.batch + row * rows.stride + 16 * Copies::chunk();
        }
        target = first_stage.address(Copies::row(), Copies::chunk());
        left = rows.bytes - 16 * Copies::chunk();
    }

    // Starts copying the `i`-th chunk; all of them in order, then done().
    __device__ void copy(int i, uint32_t stage_offset) {
        ptx::cp_async_cg_16(Tile::moved(target + stage_offset, i * Copies::step, 0), source[i], left > 0);
        source[i] += 16 * Copies::chunks;
    }
    __device__ void done() { left -= 16 * Copies::chunks; }
};

// Rows of B on their way into stages. Rows past the end become zeros.
template <class Tile, int threads>
struct ConsecutiveRows : ChunkCopies<Tile, threads> {
    using Copies = ChunkCopies<Tile, threads>;
    const uint8_t *source;
    int64_t step_bytes;
    uint32_t target;
    int left, there;   // bytes of a row from this thread's chunk on; rows of this thread

    __device__ ConsecutiveRows(const Tile &first_stage, const OperandRows &rows, int matrix, int first_row, int end_row) {
        const int row = first_row + Copies::row();
        there = ceil_div(max(end_row - row, 0), Copies::step);
        source = rows.data + matrix * rows.batch + row * rows.stride + 16 * Copies::chunk();
        step_bytes = Copies::step * rows.stride;
        target = first_stage.address(Copies::row(), Copies::chunk());
        left = rows.bytes - 16 * Copies::chunk();
    }

    __device__ void copy(int i, uint32_t stage_offset) {
        ptx::cp_async_cg_16(Tile::moved(target + stage_offset, i * Copies::step, 0), source, left > 0 && i < there);
        source += step_bytes;
    }
    __device__ void done() {
        source += 16 * Copies::chunks - Copies::count * step_bytes;
        left -= 16 * Copies::chunks;
    }
};

// How a block divides a tile of C: `rows` x `cols` of it by warps of `warp_rows` x 64, so that a warp has whole blocks of any format
// also where two columns become one; `blocks` blocks to a multiprocessor.
template <int tile>
struct TileShape;
template <>
struct TileShape<64> {
    static constexpr int rows = 64, cols = 64, warp_rows = 16, warp_cols = 64, blocks = 2;
};
template <>
struct TileShape<128> {
    static constexpr int rows = 128, cols = 128, warp_rows = 64, warp_cols = 64, blocks = 2;
};
template <>
struct TileShape<256> {
    static constexpr int rows = 128, cols = 256, warp_rows = 64, warp_cols = 64, blocks = 1;
};

template <int tile>
struct GemmShape : TileShape<tile> {
    using Shape = TileShape<tile>;
    static constexpr int warp_columns = Shape::cols / Shape::warp_cols, warps = Shape::rows / Shape::warp_rows * warp_columns;
    static constexpr int threads = 32 * warps, slices = Shape::warp_rows / 16, column_tiles = Shape::warp_cols / 8;
    static constexpr int budget = ptx::shared_bytes_per_block / Shape::blocks;
    static constexpr bool roomy = ptx::shared_bytes_per_block > 128 * 1024;

    using Sums = tile::Accumulator[slices][column_tiles];
    using Staging = tile::AccumulatorStaging<Shape::warp_cols>;
    static constexpr int staged = roomy || slices < 2 ? slices : 2;   // at once: sums that still wait hold registers

    // This warp's first row and column in the tile.
    __device__ static int warp_row() { return threadIdx.x / 32 / warp_columns * Shape::warp_rows; }
    __device__ static int warp_col() { return threadIdx.x / 32 % warp_columns * Shape::warp_cols; }
};

// Both operands in 16 bits.
template <class Element_, int tile_>
struct Core16 : GemmShape<tile_> {
    using Shape = GemmShape<tile_>;
    using Element = Element_;
    static constexpr int row_bytes = tile_ == 64 ? 128 : 64, steps = row_bytes / 32;
    using TileA = tile::SharedTile<Shape::rows, row_bytes>;
    using TileB = tile::SharedTile<Shape::cols, row_bytes>;
    struct Stage {
        TileA a;
        TileB b;
    };
    static constexpr int fitting = Shape::budget / int(sizeof(Stage)), stages = fitting < 6 ? fitting : 6;
    static_assert(stages >= 2);
    struct Shared {
        union {
            Stage stage[stages];
            typename Shape::Staging staging[Shape::warps][Shape::staged];
        };
    };

    // Sums of the block's tile. Fragments are loaded one step ahead of their MMAs, also from the next slice.
    __device__ static void multiply(typename Shape::Sums &sums, Shared &shared, const OperandRows &a, const OperandRows &b,
                                    const GemmOptions &options, const TilePlace &place) {
        GatheredRows<TileA, Shape::threads> rows_a(shared.stage[0].a, a, options, place);
        ConsecutiveRows<TileB, Shape::threads> rows_b(shared.stage[0].b, b, place.group, place.first_col, options.cols);
        const int slices = ceil_div(a.bytes, row_bytes);
        constexpr int copies_a = decltype(rows_a)::count, copies = copies_a + decltype(rows_b)::count;
        int copied = 0;
        uint32_t filled = 0;   // offset of the stage that is filled next
        // Parts of the copy of the next slice, so that they go out between MMAs.
        auto copy_part = [&](int part, int parts) {
            if (copied < slices) {
#pragma unroll
                for (int i = part * copies / parts; i < (part + 1) * copies / parts; ++i) {
                    if (i < copies_a) rows_a.copy(i, filled);
                    else rows_b.copy(i - copies_a, filled);
                }
                if (part == parts - 1) rows_a.done(), rows_b.done();
            }
            if (part < parts - 1) return;
            ++copied;
            filled = filled == (stages - 1) * sizeof(Stage) ? 0 : filled + sizeof(Stage);
            ptx::cp_async_commit_group();
        };
#pragma unroll
        for (int i = 0; i < stages - 1; ++i) copy_part(0, 1);

        const uint32_t address_a = tile::address_a(shared.stage[0].a) + Shape::warp_row() * row_bytes;
        const uint32_t address_b = tile::address_b(shared.stage[0].b) + Shape::warp_col() * row_bytes;
        constexpr int pairs = Shape::column_tiles / 2;   // of neighbouring column tiles
        tile::FragmentA of_a[2][Shape::slices];
        tile::FragmentB of_b[2][2];
        auto load_a = [&](int step, uint32_t offset) {
#pragma unroll
            for (int i = 0; i < Shape::slices; ++i)
                tile::load_a<TileA>(of_a[step % 2][i], address_a + offset, 16 * i, 2 * (step % steps));
        };
        auto load_b = [&](int step, int pair, uint32_t offset) {
            tile::load_b<TileB>(of_b[pair % 2], address_b + offset, 16 * pair, 2 * (step % steps));
        };
        ptx::cp_async_wait_group<stages - 2>();
        ptx::bar_sync();   // the first slice has landed for everyone
        load_a(0, 0);
        load_b(0, 0, 0);
        uint32_t offset = 0;
#pragma unroll 1
        for (int slice = 0; slice < slices; ++slice) {
#pragma unroll
            for (int step = 0; step < steps; ++step)
#pragma unroll
                for (int pair = 0; pair < pairs; ++pair) {
                    constexpr int parts = steps * pairs - 1;
                    if (step * pairs + pair < parts) copy_part(step * pairs + pair, parts);   // over the slice before this
                    if (pair + 1 < pairs) {
                        load_b(step, pair + 1, offset);
                    } else {   // behind the last slice some that nobody needs
                        if (step + 1 == steps) {
                            ptx::cp_async_wait_group<stages - 2>();
                            ptx::bar_sync();   // the next slice has landed for everyone; everyone has loaded all of this one
                            if (slice + 1 < slices) offset = offset == (stages - 1) * sizeof(Stage) ? 0 : offset + sizeof(Stage);
                        }
                        load_a(step + 1, offset);
                        load_b(step + 1, 0, offset);
                    }
#pragma unroll
                    for (int i = 0; i < Shape::slices; ++i)
#pragma unroll
                        for (int half = 0; half < 2; ++half)
                            tile::multiply(sums[i][2 * pair + half], of_a[step % 2][i], of_b[pair % 2][half], Element{});
                }
        }
        ptx::cp_async_wait_group<0>();
        ptx::bar_sync();   // everyone is done with the stages, over which sums are staged
    }
};

// C of one block's tile.
template <class Core, class A, class B>
__device__ inline void gemm(typename Core::Shared &shared, const A &a, const B &b, const GemmOptions &options) {
    const TilePlace place = TilePlace::of_block<Core::rows, Core::cols>(options);
    if (!place.there) return;
    typename Core::Sums sums = {};
    Core::multiply(sums, shared, a, b, options, place);

    const Epilogue epilogue(options.epilogue, place.matrix, place.group, options.rows, options.cols);
    auto &staging = shared.staging[threadIdx.x / 32];
    const int row = place.first_row + Core::warp_row(), col = place.first_col + Core::warp_col();
#pragma unroll 1   // there is much code in an epilogue
    for (int slice = 0; slice < Core::slices; slice += Core::staged) {
#pragma unroll
        for (int i = 0; i < Core::staged; ++i) staging[i].put(sums[i]);
#pragma unroll
        for (int i = Core::staged; i < Core::slices; ++i)   // the next ones, so that no others need registers
#pragma unroll
            for (int j = 0; j < Core::column_tiles; ++j)
#pragma unroll
                for (int k = 0; k < 4; ++k) sums[i - Core::staged][j][k] = sums[i][j][k];
#pragma unroll 1
        for (int i = 0; i < Core::staged; ++i) epilogue.finish(staging[i], row + 16 * (slice + i), place.end_row, col);
    }
    epilogue.fill_tile(place.first_row + Core::rows >= options.rows, place.first_col, Core::cols);
}

}  // namespace op

// The parameters of every entry behind its operands, in order, and the options made of them: arguments, then axes, then strides
// (those of the operands before those here).
#define GEMM_ARRAYS                                                                                                     \
    const float *bias_f32, const __half *bias_f16, const __nv_bfloat16 *bias_bf16, const float *residual_f32,           \
        const __half *residual_f16, const __nv_bfloat16 *residual_bf16, const float *alphas, const float *out_global,   \
        const int *group_starts, const int *order, float *out_f32, __half *out_f16, __nv_bfloat16 *out_bf16,            \
        uint8_t *codes, uint8_t *scales
#define GEMM_SCALARS                                                                                                    \
    float alpha, int activation, float limit, float gate_alpha, float offset, int ending, int rule, int swizzled,  \
        int in_place
#define GEMM_AXES                                                                                                       \
    int rows, int width, int alpha_count, int level_count, int starts, int code_bytes, int scale_bytes
#define GEMM_STRIDES                                                                                                    \
    long long bias_f32_group, long long bias_f16_group, long long bias_bf16_group, long long residual_f32_batch,        \
        long long residual_f32_row, long long residual_f16_batch, long long residual_f16_row,                           \
        long long residual_bf16_batch, long long residual_bf16_row, long long out_f32_batch, long long out_f32_row,     \
        long long out_f16_batch, long long out_f16_row, long long out_bf16_batch, long long out_bf16_row
#define GEMM_OPTIONS(a_global, b_global, depth)                                                                         \
    {{{bias_bf16, bias_f16, bias_f32, bias_bf16 ? bias_bf16_group : bias_f16 ? bias_f16_group : bias_f32_group},        \
      {residual_bf16, residual_f16, residual_f32,                                                                       \
       residual_bf16 ? residual_bf16_row : residual_f16 ? residual_f16_row : residual_f32_row},                         \
      {out_bf16, out_f16, out_f32, out_bf16 ? out_bf16_row : out_f16 ? out_f16_row : out_f32_row},                      \
      residual_bf16 ? residual_bf16_batch : residual_f16 ? residual_f16_batch : residual_f32_batch,                     \
      out_bf16 ? out_bf16_batch : out_f16 ? out_f16_batch : out_f32_batch,                                              \
      codes, scales, alphas, a_global, b_global, out_global, alpha, limit, gate_alpha, offset, activation, ending,      \
      rule, swizzled, in_place, alpha_count, level_count, width, code_bytes},                                                     \
     group_starts, order, batch, tokens, rows, cols, depth, groups}
