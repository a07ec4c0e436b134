// Matrix products of operands in 16 bits whose C has few tiles: blocks of 32 rows x 16 columns, so that more
// multiprocessors work, each with less to copy before the first MMA. A warp has 16 rows; others only copy. The sums are
// those of the large tiles, bit by bit.
#pragma once

#include <cstdint>

#include "../ptx/cp_async.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "../ptx/named_barrier.cuh"
#include "../tile/fragment.cuh"
#include "../tile/shared.cuh"
#include "early.cuh"
#include "gemm.cuh"

namespace op {

// The narrow blocks of an entry on whole tiles.
template <class Core>
struct NarrowBlocks {
    static constexpr int rows = 32, cols = 16, row_bytes = 256, steps = row_bytes / 32, threads = Core::threads;
    using TileA = tile::SharedTile<rows, row_bytes>;
    using TileB = tile::SharedTile<cols, row_bytes>;
    struct Stage {
        TileA a;
        TileB b;
    };
    static constexpr int fitting = sizeof(typename Core::Shared) / sizeof(Stage), stages = fitting < 6 ? fitting : 6;
    static_assert(stages > 2 && 16 * threads / 32 >= rows);
    struct Shared {
        Stage stage[stages];
    };

    // Whether a launch consists of these blocks: it then has more of them than whole tiles have columns.
    __device__ static bool make_up(const GemmOptions &options) {
        return gridDim.x > ceil_div(options.cols, Core::cols);
    }
    __device__ static TilePlace place(const GemmOptions &options) {
        TilePlace place;
        place.matrix = place.group = blockIdx.z;
        place.first_row = blockIdx.y * rows, place.end_row = options.rows;
        place.first_col = blockIdx.x * cols;
        place.there = true;
        return place;
    }
};

// The numbers of a warp's accumulators of 16 rows x 16 columns among rows of one of three types. `word` has them as
// loaded: they become floats only when they are needed.
struct NarrowNumbers {
    static constexpr int tiles = 2;
    TypedRows rows;
    uint8_t *first[2];   // of the two rows of this lane
    uint32_t word[tiles][4];

    // The first row of this lane, and its distance to the second one; this lane's first column.
    __device__ NarrowNumbers(const TypedRows &rows, int row, int step, int column) : rows(rows) {
        first[0] = rows.at(row, column), first[1] = first[0] + step * rows.stride;
    }
    // Calls body(tile, i, address) with addresses as of numbers of a type, for each that exists.
    template <class Number, class Body>
    __device__ void each(const bool (&row_there)[2], const bool (&column_there)[tiles][2], Body &&body) const {
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (row_there[i / 2] && column_there[tile][i % 2])
                    body(tile, i, reinterpret_cast<Number *>(first[i / 2]) + tile * tile::mma_columns + i % 2);
    }
    // In place of numbers that are not there: -0, which changes no sum.
    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < 4 * tiles; ++i) word[i / 4][i % 4] = 0x80000000u;
    }
    __device__ void load(const bool (&row_there)[2], const bool (&column_there)[tiles][2]) {
        const auto get = [&](int tile, int i, auto *source) { word[tile][i] = *source; };
        if (rows.type == TypedRows::Type::f32) each<const uint32_t>(row_there, column_there, get);
        else each<const uint16_t>(row_there, column_there, get);
    }
    // Makes floats of the words.
    __device__ void decode() {
        const auto each = [&](auto &&change) {
#pragma unroll
            for (int i = 0; i < 4 * tiles; ++i) word[i / 4][i % 4] = change(word[i / 4][i % 4]);
        };
        if (rows.type == TypedRows::Type::bf16) each([](uint32_t bits) { return bits << 16; });
        if (rows.type == TypedRows::Type::f16)
            each([](uint32_t bits) { return __float_as_uint(__half2float(__ushort_as_half(bits))); });
    }
    __device__ float value(int tile, int i) const { return __uint_as_float(word[tile][i]); }
};

// The epilogue of a warp's 16 rows x 16 columns, where its accumulators are. Its numbers are loaded ahead of the MMAs.
struct NarrowEpilogue {
    static constexpr int tiles = NarrowNumbers::tiles;
    NarrowNumbers bias, residual, out;
    Activation activation;
    bool row_there[2], column_there[tiles][2];
    bool pairs;   // whether pairs of columns are stored at once

    __device__ NarrowEpilogue(const EpilogueOptions &options, const TilePlace &place, int row, int column)
        : bias(TypedRows(options.bias, 0), place.group, 0, column),
          residual(options.in_place ? TypedRows(options.out, place.matrix * options.out_batch)
                                    : TypedRows(options.residual, place.matrix * options.residual_batch),
                   row, 8, column),
          out(TypedRows(options.out, place.matrix * options.out_batch), row, 8, column),
          activation(Activation(options.activation)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) row_there[i] = row + 8 * i < place.end_row;
#pragma unroll
        for (int i = 0; i < 2 * tiles; ++i)
            column_there[i / 2][i % 2] = column + i / 2 * tile::mma_columns + i % 2 < options.width;
        const uint32_t ends = uint32_t(reinterpret_cast<uintptr_t>(out.rows.data)) | uint32_t(out.rows.stride);
        pairs = ends % 4 == 0 && options.width % 2 == 0;
    }

    // Called behind the wait for the launches ahead.
    __device__ void load() {
        const bool once[2] = {true, false};   // both rows have the same biases
        bias.clear();
        if (bias.rows.there()) bias.load(once, column_there);
        if (residual.rows.there()) residual.load(row_there, column_there);
    }
    __device__ void finish(const tile::Accumulator (&sums)[tiles], float alpha) {
        float values[2][8] = {};
        bias.decode();
#pragma unroll
        for (int i = 0; i < 4 * tiles; ++i) values[0][i] = fmaf(sums[i / 4][i % 4], alpha, bias.value(i / 4, i % 2));
        activate(values, activation);
        if (residual.rows.there()) {
            residual.decode();
#pragma unroll
            for (int i = 0; i < 4 * tiles; ++i) values[0][i] += residual.value(i / 4, i % 4);
        }
        const auto type = out.rows.type;
        if (type == TypedRows::Type::f32) {
            out.each<float>(row_there, column_there,
                            [&](int tile, int i, float *target) { *target = values[0][4 * tile + i]; });
            return;
        }
        uint32_t pair[2 * tiles];
        const auto round = [&](auto element) {
#pragma unroll
            for (int i = 0; i < 2 * tiles; ++i)
                pair[i] = tile::rounded_pair(values[0][2 * i + 1], values[0][2 * i], element);
        };
        if (type == TypedRows::Type::bf16) round(__nv_bfloat16{});
        else round(__half{});
        out.each<uint16_t>(row_there, column_there, [&](int tile, int i, uint16_t *target) {
            if (!pairs) *target = pair[2 * tile + i / 2] >> i % 2 * 16;
            else if (i % 2 == 0) *reinterpret_cast<uint32_t *>(target) = pair[2 * tile + i / 2];
        });
    }
};

// C of a narrow block. B is prefetched into the L2 while the launch ahead may still run: the launches see each other's
// memory there, so that this is right even if that launch writes B. Only if a thread has one line at most: launches
// that did not begin early have no time for more.
template <class Core>
__device__ inline void gemm_of_narrow_blocks(const OperandRows &a, const OperandRows &b, const GemmOptions &options) {
    using Blocks = NarrowBlocks<Core>;
    using Stage = typename Blocks::Stage;
    constexpr int stages = Blocks::stages, steps = Blocks::steps;
    auto &shared = ::shared<typename Blocks::Shared>();
    const TilePlace place = Blocks::place(options);
    const int slices_of_rows = ceil_div(min(place.end_row - place.first_row, Blocks::rows), tile::mma_rows),
              rows = slices_of_rows * tile::mma_rows;   // those past the end repeat the last one
    let_next_begin();

    // Where this thread copies from, and where its numbers are.
    using CopiesA = GatheredRows<typename Blocks::TileA, Blocks::threads>;
    const auto copies_of_a = [&] {
        if (options.order) {   // in memory
            wait_for_launches_ahead();
            return CopiesA(shared.stage[0].a, a, options, place);
        }
        GemmOptions in_order = options;
        in_order.order = nullptr;   // so that the compiler knows it
        return CopiesA(shared.stage[0].a, a, in_order, place);
    };
    CopiesA rows_a = copies_of_a();
    ConsecutiveRows<typename Blocks::TileB, Blocks::threads> rows_b(shared.stage[0].b, b, place.group, place.first_col,
                                                                    options.cols);
    const int slices = ceil_div(a.bytes, Blocks::row_bytes), warp = threadIdx.x / 32;
    NarrowEpilogue epilogue(options.epilogue, place, place.first_row + tile::mma_rows * warp + tile::accumulator_row(0),
                            place.first_col + tile::accumulator_column(0));
    constexpr int line = 128;
    const int lines = ceil_div(b.bytes, line), all = lines * min(options.cols - place.first_col, Blocks::cols);
    const uint8_t *const first_of_b = b.data + place.group * b.batch + place.first_col * b.stride;
    const int mine = threadIdx.x;
    if (mine < all && all <= Blocks::threads)
        ptx::prefetch_global_l2_early(first_of_b + mine / lines * b.stride + mine % lines * line);
    wait_for_launches_ahead();

    // Fill all stages but one.
    int copied = 0;
    uint32_t filled = 0, offset = 0;   // of the stage to fill next; of the one that is multiplied
    const auto copy = [&] {
        if (copied < slices) {
#pragma unroll
            for (int i = 0; i < decltype(rows_a)::count; ++i)
                if (i * decltype(rows_a)::step < rows) rows_a.copy(i, filled);
#pragma unroll
            for (int i = 0; i < decltype(rows_b)::count; ++i) rows_b.copy(i, filled);
            rows_a.done(), rows_b.done();
        }
        ++copied;
        ptx::cp_async_commit_group();
    };
    const auto next_in_ring = [](uint32_t at) { return at == (stages - 1) * sizeof(Stage) ? 0 : at + sizeof(Stage); };
#pragma unroll 1
    for (int i = 0; i < stages - 1; ++i) copy(), filled = next_in_ring(filled);
    const auto await = [&] {
        ptx::cp_async_wait_group<stages - 2>();
        // All threads see the next slice and have loaded the one before. Warps that only copy wait in another place.
        ptx::bar_sync(1, Blocks::threads);
    };
    if (warp >= slices_of_rows) {
        await();
#pragma unroll 1
        for (int slice = 0; slice < slices; ++slice) {
            copy(), filled = next_in_ring(filled);
            await();
        }
        return;
    }

    // Fragments are loaded two steps ahead of their MMAs, also from the next slice.
    constexpr int ahead = 2, held = 4;
    static_assert(steps % held == 0 && ahead < held);
    tile::FragmentA of_a[held];
    tile::FragmentB of_b[held][2];
    const uint32_t address_a = tile::address_a(shared.stage[0].a) + warp * tile::mma_rows * Blocks::row_bytes;
    const uint32_t address_b = tile::address_b(shared.stage[0].b);
    const auto load = [&](int step) {
        tile::load_a<typename Blocks::TileA>(of_a[step % held], address_a + offset, 0, 2 * (step % steps));
        tile::load_b<typename Blocks::TileB>(of_b[step % held], address_b + offset, 0, 2 * (step % steps));
    };
    epilogue.load();
    const float alpha = options.epilogue.factor(place.group);
    tile::Accumulator sums[2] = {};
    await();
    if (slices > 0) {
#pragma unroll
        for (int step = 0; step < ahead; ++step) load(step);
    }
#pragma unroll 1
    for (int slice = 0; slice < slices; ++slice) {
        static_for<steps>([&](auto step) {
            if constexpr (step == 0) copy();   // over the slice before this one
            if constexpr (step + ahead == steps) {
                filled = next_in_ring(filled), offset = next_in_ring(offset);
                await();
            }
            if (step + ahead < steps || slice + 1 < slices) load(step + ahead);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                tile::multiply(sums[half], of_a[step % held], of_b[step % held][half], typename Core::Element{});
        });
    }
    epilogue.finish(sums, alpha);
}

// C of one block of an entry of 16-bit operands: of narrow blocks, or of whole tiles. Launches on small tiles may begin
// early.
template <class Core>
__device__ __forceinline__ void gemm_in_16_bits(const OperandRows &a, const OperandRows &b,
                                                const GemmOptions &options) {
    if constexpr (Core::divides_columns) {
        if (NarrowBlocks<Core>::make_up(options)) {
            gemm_of_narrow_blocks<Core>(a, b, options);
            return;
        }
        wait_for_launches_ahead();
    }
    gemm<Core>(a, b, options);
}

}   // namespace op
