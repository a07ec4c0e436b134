// Fused attention on operands of 16 bits: S = Q K^T, online softmax in registers, O = P V, a tile of keys at a time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernel.cuh"
#include "../ptx/alu.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/cp_async_or_none.cuh"
#include "../ptx/exit.cuh"
#include "../tile/attention_shape.cuh"
#include "../tile/block_tiles.cuh"
#include "../tile/format.cuh"
#include "../tile/fragment.cuh"
#include "../tile/search.cuh"
#include "../tile/shared.cuh"
#include "../tile/stored_rows.cuh"
#include "../tile/walked_chunks.cuh"
#include "problem.cuh"
#include "sequences.cuh"
#include "softmax.cuh"

namespace op {

// Q, K and V of bf16 or f16, in place.
template <class Element>
struct FloatOperands {
    const Element *q;   // [batch, heads_kv, group, queries, dim]
    const Element *k;   // [batch, heads_kv, keys, dim]
    const Element *v;   // [batch, heads_kv, keys, dim_v]
    StridesQ q_strides;
    StridesK k_strides, v_strides;
};

// How far scores may exceed row_max, in units of log2. In bf16 and f16, P up to 2^8 has the same relative error as P up
// to 1. If maxima are an output, row_max is the row's maximum.
__device__ inline float headroom_in_16_bits(bool gives_maxima) { return gives_maxima ? 0.0f : 8.0f; }

// The running softmax with P in 16 bits, `lowered` in bf16, which has the exponents of f32. Sums that become too small
// are computed again, so that bf16 values of any size are summed with the same relative error.
template <class Element, int slices, int dim_v>
using OnlineSoftmaxIn16Bits = OnlineSoftmax<slices, dim_v, 0, false, std::is_same_v<Element, __nv_bfloat16>>;

// How a block divides the work (tile/attention_shape.cuh): tiles of `keys` keys pass through `stages` stages. OneSlice
// serves few rows or few blocks.
template <class Element_, int dim_, int dim_v_, bool one_slice = false>
struct Tiling : tile::AttentionShape<dim_, one_slice> {
    using Shape = tile::AttentionShape<dim_, one_slice>;
    using Element = Element_;
    using OneSlice = Tiling<Element_, dim_, dim_v_, Shape::has_halves>;
    static constexpr int dim = dim_, dim_v = dim_v_;
    static constexpr int slices = Shape::slices, warps = Shape::warps, keys = Shape::keys;
    static constexpr bool keeps_q = Shape::keeps_q;
    static constexpr bool is_bf16 = std::is_same_v<Element, __nv_bfloat16>;
    static constexpr bool weaves = Shape::weaves && is_bf16;   // f16 was not measured
    static constexpr bool copies_early = one_slice;
    static constexpr bool ends_quickly = Shape::ends_quickly && (one_slice || is_bf16);   // whole blocks of f16 spill
    static constexpr bool walks_rows = true;                                              // see store_rows
    static constexpr bool fills_q = one_slice && keeps_q;     // Q stays in registers, its buffer is one more stage
    static constexpr bool hurries = fills_q;                  // see Problem
    static constexpr bool exits_early = hurries && is_bf16;   // see write_quickly; f16 is slower with it
    static constexpr int stages = fills_q ? 3 : 2;            // one is read while the others fill
    static constexpr int threads = 32 * warps;
    static constexpr int rows = 16 * slices * warps;

    // The output of a block in a 16-bit type, over its Q.
    template <class Output>
    using OutputTile = tile::SharedTile<rows, dim_v * sizeof(Output)>;
    static_assert(dim_v <= dim, "the output is staged where Q was");

    struct Stage {
        tile::SharedTile<keys, dim * sizeof(Element)> k;
        tile::SharedTile<keys, dim_v * sizeof(Element)> v;
    };
    using QueryTile = tile::SharedTile<rows, dim * sizeof(Element)>;
    struct Shared {
        union {
            QueryTile q;
            std::conditional_t<fills_q, Stage, QueryTile> stage_over_q;   // number -1
        };
        Stage stage[2];
    };
    static_assert(sizeof(Shared) <= Shape::shared_bytes, "the tiles fit");
};

// Walks through every `step`-th row of a problem in an array, from `row` on. Only the first needs a division into query
// and head.
template <class Element>
struct RowWalker {
    Element *at;
    long long row_step, next_query;
    int head, group, group_step;

    __device__ RowWalker(Element *array, const StridesQ &strides, const Problem &problem, int row, int step)
        : group(problem.options.group) {
        group_step = problem.group_of(step);
        head = problem.group_of(row);
        at = array + problem.at(strides, problem.query_of(row), head);
        row_step = problem.query_of(step) * strides.query + group_step * strides.group;
        next_query = strides.query - group * strides.group;
    }

    // The same from query and head on, with a step of `steps` queries and heads: without divisions.
    __device__ RowWalker(Element *array, const StridesQ &strides, const Problem &problem, int2 from, int2 steps)
        : group_step(steps.y), head(from.y), group(problem.options.group) {
        at = array + problem.at(strides, from.x, from.y);
        row_step = steps.x * strides.query + steps.y * strides.group;
        next_query = strides.query - group * strides.group;
    }

    __device__ void advance() {
        at += row_step;
        head += group_step;
        if (head >= group) {
            head -= group;
            at += next_query;
        }
    }
};

// Copies rows of K or V into the stages, one tile of keys after another. A thread copies one chunk of several rows.
template <class Element, int threads, class Tile>
struct RowCopier {
    // Rows that the block copies at once: a multiple of 8, so that all rows of a thread have the same swizzle. If 3
    // divides the chunks of a row, some threads copy nothing.
    static constexpr int step = threads / Tile::row_chunks / 8 * 8, lanes = step * Tile::row_chunks;
    static_assert(step > 0 && Tile::rows % step == 0, "the block goes through a tile in whole steps");

    const char *source;   // this thread's chunk in its next row
    size_t step_bytes;
    uint32_t target;   // address of that chunk in the first stage
    bool present;      // whether rows have this chunk

    RowCopier() = default;

    __device__ RowCopier(const Tile &first_stage, const Element *first_row, long long stride, int columns) {
        const int row = threadIdx.x / Tile::row_chunks, chunk = threadIdx.x % Tile::row_chunks;
        present = chunk * tile::elements_per_chunk<Element> < columns;
        source = reinterpret_cast<const char *>(first_row + row * stride) + (present ? 16 * chunk : 0);
        step_bytes = step * stride * sizeof(Element);
        target = first_stage.address(row, chunk);
    }

    // Starts copying the next tile to `stage_offset` bytes behind the first stage. Only its first `rows` rows exist;
    // the others become zeros.
    __device__ void copy(uint32_t stage_offset, int rows) {
        if (lanes < threads && threadIdx.x >= lanes) return;
        if (rows >= Tile::rows) {
#pragma unroll
            for (int i = 0; i < Tile::rows; i += step, source += step_bytes)
                ptx::cp_async_cg_16(Tile::moved(target + stage_offset, i, 0), source, present);
        } else {   // the last tile
            const int row = threadIdx.x / Tile::row_chunks;
#pragma unroll 1
            for (int i = 0; i < Tile::rows; i += step, source += step_bytes)
                ptx::cp_async_cg_16(Tile::moved(target + stage_offset, i, 0), source, present && row + i < rows);
        }
    }

    // The same in straight code, which is shorter.
    __device__ void copy_straight(uint32_t stage_offset, int rows) {
        const int left = present ? rows - int(threadIdx.x / Tile::row_chunks) : 0;
        if (lanes < threads && threadIdx.x >= lanes) return;
#pragma unroll
        for (int i = 0; i < Tile::rows; i += step, source += step_bytes)
            ptx::cp_async_cg_16_if(i < left, Tile::moved(target + stage_offset, i, 0), source);
    }

    // The same if `copies`, without a branch.
    __device__ void copy_if(bool copies, uint32_t stage_offset, int rows) {
        const int left = present ? rows - int(threadIdx.x / Tile::row_chunks) : 0;
        if constexpr (lanes < threads) copies = copies && threadIdx.x < lanes;
#pragma unroll
        for (int i = 0; i < Tile::rows; i += step, source += step_bytes)
            ptx::cp_async_cg_16_or_none(copies, Tile::moved(target + stage_offset, i, 0), source, i < left);
    }
};

// Starts copying a problem's rows of Q from `first_row` on; missing rows and columns become zeros. A thread copies one
// chunk of several rows. Called by the whole block.
template <class Element, int threads, class Tile>
__device__ inline void copy_queries(Tile &target, const Element *q, const StridesQ &strides, const Problem &problem,
                                    int first_row) {
    constexpr int columns = Tile::row_chunks, step = threads / columns,
                  lanes = step * columns;   // fewer than `threads` if 3 divides `columns`
    if (threadIdx.x >= lanes) return;
    const int first = threadIdx.x / columns, chunk = threadIdx.x % columns,
              column = chunk * tile::elements_per_chunk<Element>;
    const bool present = column < problem.options.dim;
    RowWalker<const Element> source(q + (present ? column : 0), strides, problem, first_row + first, step);
#pragma unroll 4
    for (int row = first; row < Tile::rows; row += step, source.advance())
        ptx::cp_async_cg_16(target.address(row, chunk), source.at, present && first_row + row < problem.rows);
}

// The same in few instructions. begin_query: that of the first row.
template <class Element, int threads, class Tile>
__device__ inline void copy_queries_in_a_hurry(Tile &target, const Element *q, const StridesQ &strides,
                                               const Problem &problem, int first_row, int begin_query) {
    const int group = problem.options.group;
    if (group == 1 || problem.queries == 1) {   // rows are queries, or the heads of one query
        const bool are_queries = group == 1;
        const Element *at = q + problem.at(strides, are_queries ? first_row : 0, are_queries ? 0 : first_row);
        RowCopier<Element, threads, Tile> rows(target, at, are_queries ? strides.query : strides.group,
                                               problem.options.dim);
        rows.copy_straight(0, problem.rows - first_row);
        return;
    }
    constexpr int columns = Tile::row_chunks, step = threads / columns, lanes = step * columns;
    if (threadIdx.x >= lanes) return;
    const int first = threadIdx.x / columns, chunk = threadIdx.x % columns,
              column = chunk * tile::elements_per_chunk<Element>;
    const bool present = column < problem.options.dim;
    // Query and head of a row behind the first one of a query: in large groups, row and step are below two queries.
    const auto divided = [&](int row) {
        const int query = group > step ? row >= group : quotient_of_few(row, group);
        return make_int2(query, row - query * group);
    };
    int2 from = divided(first_row - begin_query * group + first);
    from.x += begin_query;
    RowWalker<const Element> source(q + (present ? column : 0), strides, problem, from, divided(step));
#pragma unroll 1
    for (int row = first; row < Tile::rows; row += step, source.advance())
        ptx::cp_async_cg_16(target.address(row, chunk), source.at, present && first_row + row < problem.rows);
}

// The rows of Q of a warp as A of its MMAs: `kept` in registers, or loaded for each use.
template <class Tile, int slices, int steps, bool kept>
struct WarpQueries {
    uint32_t address;   // this lane's, as of tile::address_a
    tile::FragmentA fragments[kept ? steps : 1][slices];

    // Called once Q has landed.
    __device__ void keep() {
        if constexpr (kept)
#pragma unroll
            for (int step = 0; step < steps; ++step) read(fragments[step], step);
    }

    // Columns 16 step .. + 15.
    __device__ void load(tile::FragmentA (&a)[slices], int step) const {
        if constexpr (kept) {
#pragma unroll
            for (int slice = 0; slice < slices; ++slice)
#pragma unroll
                for (int i = 0; i < 4; ++i) a[slice][i] = fragments[step][slice][i];
        } else {
            read(a, step);
        }
    }

    __device__ void read(tile::FragmentA (&a)[slices], int step) const {
#pragma unroll
        for (int slice = 0; slice < slices; ++slice) tile::load_a<Tile>(a[slice], address, 16 * slice, 2 * step);
    }
};

struct DoNothing {
    __device__ void operator()() const {}
};

// s = Q K^T for the rows of a warp and some keys of a tile; s[..][j] covers keys 8 j .. 8 j + 7. k is this lane's
// address as of tile::address_b. before_last() is called between the last loads and the last MMAs.
template <class Element, int dim, class KeyTile, class Queries, int slices, int tiles, class BeforeLast = DoNothing>
__device__ inline void multiply_scores(tile::Accumulator (&s)[slices][tiles], const Queries &q, uint32_t k,
                                       BeforeLast &&before_last = BeforeLast{}) {
#pragma unroll
    for (auto &slice : s)
#pragma unroll
        for (auto &accumulator : slice)
#pragma unroll
            for (float &element : accumulator) element = 0.0f;
#pragma unroll
    for (int step = 0; step < dim / 16; ++step) {
        tile::FragmentA a[slices];
        q.load(a, step);
        tile::FragmentB b[tiles / 2][2];
        const auto load = [&](int pair) { tile::load_b<KeyTile>(b[pair], k, 16 * pair, 2 * step); };
        if constexpr (!std::is_same_v<BeforeLast, DoNothing>) {
#pragma unroll
            for (int pair = 0; pair < tiles / 2; ++pair) load(pair);
            if (step == dim / 16 - 1) before_last();
        }
#pragma unroll
        for (int pair = 0; pair < tiles / 2; ++pair) {
            if constexpr (std::is_same_v<BeforeLast, DoNothing>) load(pair);
#pragma unroll
            for (int slice = 0; slice < slices; ++slice)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    tile::multiply(s[slice][2 * pair + half], a[slice], b[pair][half], Element{});
        }
    }
}

// softmax.o += P V for a tile of V [keys, dim_v]; P is rounded to the type of V. v is this lane's
// tile::address_b_transposed. If `scaled`, P is multiplied by the softmax's value_factors().
template <class Element, int dim_v, class Tile, bool scaled, class Softmax, int slices, int tiles>
__device__ __forceinline__ void accumulate_values(Softmax &softmax, const tile::Accumulator (&p)[slices][tiles],
                                                  uint32_t v) {
#pragma unroll
    for (int step = 0; step < tiles / 2; ++step) {   // 16 keys
        tile::FragmentA a[slices];
#pragma unroll
        for (int slice = 0; slice < slices; ++slice)
            tile::accumulators_to_a(a[slice], p[slice][2 * step], p[slice][2 * step + 1], Element{});
        if constexpr (scaled)
#pragma unroll
            for (auto &fragment : a) tile::scale_a(fragment, softmax.value_factors(), Element{});
#pragma unroll
        for (int columns = 0; columns < dim_v / 16; ++columns) {
            tile::FragmentB b[2];
            tile::load_b_transposed<Tile>(b, v, 16 * step, 2 * columns);
#pragma unroll
            for (int slice = 0; slice < slices; ++slice)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    tile::multiply(softmax.o[slice][2 * columns + half], a[slice], b[half], Element{});
        }
    }
}

// Calls body(score, slice, half, key) for every score of a lane. `key` counts from the lane's first key of the tile and
// is a constant, since the orders of block_tiles.cuh are linear in the bits of tile and column.
template <class Order, int slices, int tiles, class Body>
__device__ inline void for_scores(tile::Accumulator (&s)[slices][tiles], Body &&body) {
    tile::for_rows<slices>([&](int slice, int half) {
#pragma unroll
        for (int j = 0; j < tiles; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) body(s[slice][j][2 * half + i], slice, half, Order::key(j, i));
    });
}

// Scales, caps and masks scores, and converts them to units of log2. mask_scores hides the keys that a row does not see
// afterwards. Only masks of existing keys are read. divides_late: the division by the cap is not moved to the beginning
// of the kernel, where launches without a cap pay for its slow path.
template <class Order, bool divides_late, int slices, int tiles, class RowOf>
__device__ inline void transform_scores(tile::Accumulator (&s)[slices][tiles], const Problem &problem, RowOf &&row_of,
                                        int first_key, float scale) {
    const AttentionOptions &options = problem.options;
    for_scores<Order>(s, [&](float &score, int, int, int) { score *= scale; });
    if (options.softcap > 0.0f && options.row_shift) {   // the cap applies to scores with their shift
        float shift[slices][2];
        tile::for_rows<slices>([&](int slice, int half) {
            shift[slice][half] = __ldg(options.row_shift + problem.row_at(row_of(slice, half)));
        });
        for_scores<Order>(s, [&](float &score, int slice, int half, int) { score += shift[slice][half]; });
    }
    if (options.softcap > 0.0f) {   // tanh x = 1 - 2 / (1 + e^2x), good to 2^-22 absolute
        const float cap = divides_late ? ptx::mov_b32(options.softcap) : options.softcap;
        for_scores<Order>(s, [&](float &score, int, int, int) {
            const float power = ptx::ex2_approx_ftz_f32(score * (2.0f * log2_e / cap));
            score = options.softcap * (1.0f - 2.0f * ptx::rcp_approx_ftz_f32(1.0f + power));
        });
    }
    const int lane_key = first_key + Order::key(0, tile::accumulator_column(0)), keys = problem.keys - lane_key;
    for_scores<Order>(s, [&](float &score, int slice, int half, int key) {
        const int row = row_of(slice, half), query = problem.query_of(row), group = problem.group_of(row);
        if (key < keys && options.mask)
            score += options.mask[problem.at(options.mask_strides, query, group, lane_key + key)];
        if (key < keys && options.allowed &&
            !options.allowed[problem.at(options.allowed_strides, query, group, lane_key + key)])
            score = -INFINITY;
        // A large negative mask stays finite: a row with only such keys gets the mean of their values, not the result
        // of a row without keys.
        if (score == -INFINITY) return;
        score *= log2_e;
        if (score < no_maximum) score = no_maximum;   // NaN stays
    });
}

// The factor that converts scores to units of log2; 1 if mask_scores converts them. Never 0, since 0 times the -inf of
// a hidden key is NaN.
__device__ inline float score_factor(const Problem &problem, float scale) {
    return problem.transforms_scores() ? 1.0f : ptx::max_nan_f32(scale * log2_e, 0x1p-126f);
}

// Hides the keys of the tile that starts at `first_key` from the rows that do not see them. divides_late: see
// transform_scores.
template <class Order, bool divides_late = false, int slices, int tiles>
__device__ __forceinline__ void mask_scores(tile::Accumulator (&s)[slices][tiles], const Problem &problem, int warp_row,
                                            int first_key, float scale) {
    const AttentionOptions &options = problem.options;
    auto row_of = [&](int slice, int half) {
        return min(warp_row + 16 * slice + tile::accumulator_row(2 * half), problem.rows - 1);
    };
    if (problem.transforms_scores()) transform_scores<Order, divides_late>(s, problem, row_of, first_key, scale);
    // A row sees the keys before its end and, under a window, from its first one on.
    int bound[slices][2];
    auto bound_by = [&](auto &&key_of) {
        tile::for_rows<slices>([&](int slice, int half) {
            bound[slice][half] =
                key_of(problem.query_of(row_of(slice, half))) - first_key - Order::key(0, tile::accumulator_column(0));
        });
    };
    bound_by([&](int query) { return problem.end_visible(query); });
    for_scores<Order>(
        s, [&](float &score, int slice, int half, int key) { score = key < bound[slice][half] ? score : -INFINITY; });
    if (options.left >= problem.keys) return;
    bound_by([&](int query) { return problem.first_visible(query); });
    for_scores<Order>(
        s, [&](float &score, int slice, int half, int key) { score = key >= bound[slice][half] ? score : -INFINITY; });
}

// Stores the elements of a chunk that are not NaN.
template <class Element>
__device__ __forceinline__ void store_numbers(Element *target, const uint4 &source) {
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
        const Element element = reinterpret_cast<const Element *>(&source)[i];
        if (!__hisnan(element)) target[i] = element;
    }
}

// Writes the output of a warp's rows to `out` in 16-byte chunks, by way of `staging`, where staged_row is the warp's
// first row. If the sums were computed again, it writes only the elements that are not NaN.
//
// Short sequences are bound by the fetches of code that runs once, so rows are walked in few instructions. Block
// formats compute each address, because their loops are slower in the static model where the walk takes registers.
template <class Element, class Tiling, class Softmax>
__device__ __forceinline__ void store_rows(const Softmax &softmax,
                                           typename Tiling::template OutputTile<Element> &staging, int staged_row,
                                           Element *out, const StridesQ &strides, const Problem &problem, int warp_row,
                                           const float (&factor)[Tiling::slices][2]) {
    using Tile = typename Tiling::template OutputTile<Element>;
    __syncwarp();   // all lanes have read what the staging rows held
    if constexpr (Tiling::ends_quickly && tile::stores_quickly) {
        const uint32_t address = tile::address_a(staging) + staged_row * uint32_t(sizeof(Tile) / Tile::rows);
#pragma unroll
        for (int slice = 0; slice < Tiling::slices; ++slice)
#pragma unroll
            for (int pair = 0; pair < Tiling::dim_v / 16; ++pair) {
                tile::Accumulator o[2];
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    o[i / 4][i % 4] = softmax.o[slice][2 * pair + i / 4][i % 4] * factor[slice][i % 4 / 2];
                tile::store_rounded<Tile>(o, address, 16 * slice, 2 * pair, Element{});
            }
    } else {
#pragma unroll
        for (int slice = 0; slice < Tiling::slices; ++slice)
#pragma unroll(Softmax::rolled ? 1 : Tiling::dim_v / tile::mma_columns)
            for (int j = 0; j < Tiling::dim_v / tile::mma_columns; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const tile::Accumulator &o = softmax.o[slice][j];
                    uint32_t *chunk = reinterpret_cast<uint32_t *>(
                        &staging.at(staged_row + 16 * slice + tile::accumulator_row(2 * half), j));
                    chunk[tile::accumulator_column(0) / 2] = tile::rounded_pair(
                        o[2 * half + 1] * factor[slice][half], o[2 * half] * factor[slice][half], Element{});
                }
    }
    __syncwarp();   // the rows are complete
    if constexpr (Tiling::walks_rows) {
        using Chunks = tile::WalkedChunks<Tile::row_chunks>;
        const int first = Chunks::first_row(), chunk = Chunks::chunk(),
                  end = min(problem.rows - warp_row, 16 * Tiling::slices);
        if (!Chunks::any() || 8 * chunk >= problem.options.dim_v) return;
        if constexpr (Tiling::ends_quickly)
            if (problem.options.group == 1 && !softmax.again) {   // in few instructions
                char *target = reinterpret_cast<char *>(out + problem.at(strides, warp_row + first, 0) + 8 * chunk);
                const size_t step_bytes = Chunks::step * strides.query * sizeof(Element);
#pragma unroll
                for (int row = 0; row < 16 * Tiling::slices; row += Chunks::step, target += step_bytes)
                    if (first + row < end)
                        *reinterpret_cast<uint4 *>(target) = staging.at(staged_row + first + row, chunk);
                return;
            }
        RowWalker<Element> target(out + 8 * chunk, strides, problem, warp_row + first, Chunks::step);
        if (Softmax::lowered && softmax.again) {
#pragma unroll 1
            for (int row = first; row < end; row += Chunks::step, target.advance())
                store_numbers(target.at, staging.at(staged_row + row, chunk));
        } else {
#pragma unroll 4
            for (int row = first; row < end; row += Chunks::step, target.advance())
                *reinterpret_cast<uint4 *>(target.at) = staging.at(staged_row + row, chunk);
        }
    } else {
        tile::for_chunks_of_warp<16 * Tiling::slices, Tile::row_chunks>([&](int row, int chunk) {
            if (row >= problem.rows - warp_row || 8 * chunk >= problem.options.dim_v) return;
            Element *target = out + problem.at(strides, warp_row + row) + 8 * chunk;
            const uint4 &source = staging.at(staged_row + row, chunk);
            if (Softmax::lowered && softmax.again) store_numbers(target, source);
            else *reinterpret_cast<uint4 *>(target) = source;
        });
    }
}

// The part of the scores of a warp's rows that smoothing removed, in units of log2: whole + fraction. 0 under a cap,
// since transform_scores() has added it to the scores.
template <int slices>
struct RowShift {
    float whole[slices][2] = {}, fraction[slices][2] = {};   // in (-1, 0]

    template <class Softmax>
    __device__ RowShift(const Softmax &softmax, const Problem &problem, int warp_row) {
        const AttentionOptions &options = problem.options;
        if (!options.row_shift || options.softcap > 0.0f) return;
        tile::for_rows<slices>([&](int slice, int half) {
            if (softmax.denominator(slice, half) == 0.0f) return;   // a row without keys has no shift
            const int row = min(warp_row + 16 * slice + tile::accumulator_row(2 * half), problem.rows - 1);
            const float shift = options.row_shift[problem.row_at(row)] * log2_e;
            whole[slice][half] = ceilf(shift);
            fraction[slice][half] = shift - whole[slice][half];
        });
    }

    __device__ float at(int slice, int half) const { return whole[slice][half] + fraction[slice][half]; }
};

constexpr float too_large = 0x1p117f;   // of a row of undivided sums

// Whether any sum of the warp may be too small or, in parts of splits, too large. Sums of columns that do not exist are
// too small. Called by all lanes, before Softmax::finish().
template <class Softmax, int slices, int columns>
__device__ __forceinline__ bool any_sum_is_extreme(const tile::Accumulator (&o)[slices][columns], bool parts) {
    const auto combined = [&](uint32_t start, auto &&combine) {   // the bits of all sums but their signs
        uint32_t bits[4] = {start, start, start, start};
#pragma unroll
        for (int slice = 0; slice < slices; ++slice)
#pragma unroll
            for (int j = 0; j < columns; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    bits[(2 * j + i / 2) % 4] = combine(bits[(2 * j + i / 2) % 4], __float_as_uint(o[slice][j][i]));
        return combine(combine(bits[0], bits[1]), combine(bits[2], bits[3])) & 0x7fffffffu;
    };
    // No sum is larger than the number that has the bits of any. Lowered sums are multiplied by at most 2^80 later.
    bool large = false;
    if (parts)
        large = combined(0, [](uint32_t a, uint32_t b) { return a | b; }) >= __float_as_uint(too_large * 0x1p-80f);
    // No sum is smaller than the number that has the bits of all. Sums around 1 are lowered to exponents with a common
    // bit, so that the exact test, which takes twice as many instructions, is rare.
    constexpr float too_small = Softmax::too_small;
    const uint32_t bound = combined(~0u, [](uint32_t a, uint32_t b) { return a & b; });
    if (!ptx::vote_sync_any(large || bound < __float_as_uint(too_small))) return false;
    float least[4] = {INFINITY, INFINITY, INFINITY, INFINITY};
#pragma unroll
    for (int slice = 0; slice < slices; ++slice)
#pragma unroll
        for (int j = 0; j < columns; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) least[i] = fminf(least[i], fabsf(o[slice][j][i]));
    return ptx::vote_sync_any(large || fminf(fminf(least[0], least[1]), fminf(least[2], least[3])) < too_small);
}

// Whether sums of this warp lost bits because probabilities are lowered, so that they must be computed again. A sum of
// 0 lost none if its column of V is all zeros. word(key, j) is the pair of 16-bit values of `key` in those of the
// columns 8 j .. 8 j + 7 whose accumulators this lane holds; keys run from `begin` to `end` - 1. Called by all lanes,
// after the last tile.
template <class Softmax, int slices, int columns, class Word>
__device__ __forceinline__ bool sums_are_too_small(const Softmax &softmax,
                                                   const tile::Accumulator (&o)[slices][columns],
                                                   const Problem &problem, int warp_row, int begin, int end,
                                                   Word &&word) {
    // Whether any sum of the warp is too small.
    const int filled = problem.options.dim_v / tile::mma_columns;   // column tiles; the others hold zeros
    float least = INFINITY;
#pragma unroll
    for (int j = 0; j < columns; ++j)
        if (j < filled)
#pragma unroll
            for (int slice = 0; slice < slices; ++slice)
#pragma unroll
                for (int i = 0; i < 4; ++i) least = fminf(least, fabsf(o[slice][j][i]));
    if (!ptx::vote_sync_any(least < Softmax::too_small)) return false;

    // The columns of such sums, in rows that exist and have seen a score.
    uint32_t small[2] = {};    // bit j: this lane's first and second column of 8 j .. 8 j + 7 have small sums
    float beside[slices][2];   // added to the sums of rows that do not count
    tile::for_rows<slices>([&](int slice, int half) {
        const bool counts = warp_row + 16 * slice + tile::accumulator_row(2 * half) < problem.rows &&
                            softmax.row_max[slice][half] != no_maximum;
        beside[slice][half] = counts ? 0.0f : 1.0f;
    });
#pragma unroll
    for (int j = 0; j < columns; ++j)
        if (j < filled)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                least = INFINITY;
                tile::for_rows<slices>([&](int slice, int half) {
                    least = fminf(least, fabsf(o[slice][j][2 * half + i]) + beside[slice][half]);
                });
                small[i] |= uint32_t(least < Softmax::too_small) << j;
            }
    small[0] = tile::bits_of_columns(small[0]);
    small[1] = tile::bits_of_columns(small[1]);
    // Whether V has a value other than 0 in these columns.
#pragma unroll 1
    for (int first = begin; first < end; first += tile::tile_keys) {
        bool lost = false;
#pragma unroll 1
        for (int key = first + tile::accumulator_row(0); key < min(first + tile::tile_keys, end); key += 8)
#pragma unroll 1
            for (uint32_t left = small[0] | small[1]; left; left &= left - 1) {
                const int j = __ffs(left) - 1;
                const uint32_t pair = word(key, j);
                lost |= (small[0] >> j & 1 && pair & 0x7fffu) || (small[1] >> j & 1 && pair & 0x7fff0000u);
            }
        if (ptx::vote_sync_any(lost)) return true;
    }
    return false;
}

// Whether a row of undivided sums is scaled by 2^-32 and its maximum raised by 32. Near the largest float32, the row,
// or the sum of several such rows, would overflow. If the sums were computed again, the maximum that the first pass
// wrote decides.
template <class Softmax>
__device__ __forceinline__ bool sums_are_too_large(const Softmax &softmax, const Problem &problem, int slice, int half,
                                                   int row, float max) {
    const AttentionOptions &options = problem.options;
    if (!Softmax::lowered || !options.partial || !options.row_max) return false;
    if (softmax.again) return row < problem.rows && options.row_max[problem.split_row_at(row)] > max;
    float most = 0.0f;
#pragma unroll
    for (int j = 0; j < Softmax::columns; ++j)
        most = fmaxf(most, fmaxf(fabsf(softmax.o[slice][j][2 * half]), fabsf(softmax.o[slice][j][2 * half + 1])));
    return tile::reduce_row(most, [](float a, float b) { return fmaxf(a, b); }) * softmax.o_scale[slice][half] >=
           too_large;
}

// Adds the sinks to the sums of rows, and writes the logarithms, maxima and sums. Returns in `factor` what the outputs
// are multiplied by.
template <class Tiling, class Softmax>
__device__ __forceinline__ void write_figures(Softmax &softmax, const Problem &problem, int warp_row,
                                              float output_scale, float *exact_sum,
                                              float (&factor)[Tiling::slices][2]) {
    const AttentionOptions &options = problem.options;
    const RowShift<Tiling::slices> shift(softmax, problem, warp_row);
    float sink_share[Tiling::slices][2] = {};   // of the denominator
    if (options.sinks && problem.split == 0) {
        float new_max[Tiling::slices][2], sink[Tiling::slices][2];
        // A sink is one more key, without a value.
        tile::for_rows<Tiling::slices>([&](int slice, int half) {
            const int group = problem.group_of(warp_row + 16 * slice + tile::accumulator_row(2 * half));
            sink[slice][half] = options.sinks[problem.head * options.group + group] * log2_e - shift.at(slice, half);
            new_max[slice][half] = fmaxf(softmax.row_max[slice][half], ceilf(sink[slice][half]));
        });
        softmax.raise(new_max);
        tile::for_rows<Tiling::slices>([&](int slice, int half) {
            if (sink[slice][half] != -INFINITY)   // NaN is passed on
                sink_share[slice][half] = ptx::ex2_approx_ftz_f32(sink[slice][half] - new_max[slice][half]);
        });
    }

    // The logarithms, maxima and sums of rows.
    tile::for_rows<Tiling::slices>([&](int slice, int half) {
        const int row = warp_row + 16 * slice + tile::accumulator_row(2 * half);
        const float sum = softmax.row_sum[slice][half] + sink_share[slice][half], max = softmax.row_max[slice][half];
        const float denominator = softmax.denominator(slice, half) + sink_share[slice][half];
        // row_max is an integer: the fraction of the shift scales the sums and outputs that are relative to it.
        float part = options.partial && options.row_shift ? ptx::ex2_approx_ftz_f32(shift.fraction[slice][half]) : 1.0f;
        float given_max = max + shift.whole[slice][half];
        if (sums_are_too_large(softmax, problem, slice, half, row, given_max)) part *= 0x1p-32f, given_max += 32.0f;
        factor[slice][half] = output_scale * (options.partial       ? part
                                              : denominator == 0.0f ? 0.0f
                                                                    : __frcp_rn(denominator));
        factor[slice][half] *= softmax.o_scale[slice][half];
        if (row >= problem.rows || tile::accumulator_column(0) != 0 || (Softmax::lowered && softmax.again)) return;
        if (options.lse)
            options.lse[problem.row_at(row)] =
                sum == 0.0f ? -INFINITY : (max + ptx::lg2_approx_ftz_f32(sum) + shift.at(slice, half)) * ln_2;
        // A row without weights adds nothing when splits are merged. A row whose weights are NaN makes the merged row
        // NaN, whatever its maximum.
        if (options.row_max)
            options.row_max[problem.split_row_at(row)] = denominator > 0.0f    ? given_max
                                                         : denominator == 0.0f ? -INFINITY
                                                                               : denominator;
        if (options.row_sum) options.row_sum[problem.split_row_at(row)] = denominator * part;
        if (exact_sum) exact_sum[problem.split_row_at(row)] = sum * part;
    });
}

// Writes the parts of a split in few instructions. Returns false, and has written nothing, if the launch asks for more;
// all blocks agree on that. Called by all lanes of a warp, before Softmax::finish(). If a sum is extreme, write_results
// writes all parts again, by the same lanes.
template <class Tiling, class Softmax>
__device__ __forceinline__ bool write_parts_quickly(const Softmax &unfinished, const Problem &problem, int warp_row) {
    const AttentionOptions &options = problem.options;
    const auto bits = [](const auto *array) { return reinterpret_cast<uintptr_t>(array); };
    if (!options.partial || options.row_shift || options.dim_v != Tiling::dim_v ||
        (bits(options.out_bf16) | bits(options.out_f16) | bits(options.out_f32) | bits(options.sinks) |
         bits(options.lse)) != 0)
        return false;
    Softmax softmax = unfinished;
    softmax.again = false;
    softmax.finish();
    const bool in_order = options.group == 1 || options.queries == 1;   // neighboring rows are neighbors in arrays
    tile::for_rows<Tiling::slices>([&](int slice, int half) {
        const int row = warp_row + 16 * slice + tile::accumulator_row(2 * half);
        if (row >= problem.rows) return;
        const size_t place = in_order ? problem.split_row_at(0) + row : problem.split_row_at(row);
        const float sum = softmax.denominator(slice, half), max = softmax.row_max[slice][half];
        if (tile::accumulator_column(0) == 0) {
            if (options.row_max) options.row_max[place] = sum > 0.0f ? max : sum == 0.0f ? -INFINITY : sum;
            if (options.row_sum) options.row_sum[place] = sum;
        }
        float *target = options.partial + place * Tiling::dim_v + tile::accumulator_column(0);
        const float factor = softmax.o_scale[slice][half];
#pragma unroll
        for (int j = 0; j < Tiling::dim_v / tile::mma_columns; ++j)
            *reinterpret_cast<float2 *>(target + j * tile::mma_columns) = {softmax.o[slice][j][2 * half] * factor,
                                                                           softmax.o[slice][j][2 * half + 1] * factor};
    });
    return true;
}

// The same for an output in bf16 and nothing else, if no sum is extreme: the output is staged over Q.
template <class Tiling, class Softmax>
__device__ __forceinline__ bool write_quickly(const Softmax &unfinished, typename Tiling::Shared &shared,
                                              const Problem &problem, int first_row, int warp_row) {
    const AttentionOptions &options = problem.options;
    const auto bits = [](const auto *array) { return reinterpret_cast<uintptr_t>(array); };
    if (!options.out_bf16 || options.row_shift ||
        (bits(options.out_f16) | bits(options.out_f32) | bits(options.sinks) | bits(options.lse) |
         bits(options.partial) | bits(options.row_max) | bits(options.row_sum)) != 0)
        return false;
    Softmax softmax = unfinished;
    softmax.again = false;
    softmax.finish();
    float factor[Tiling::slices][2];
    tile::for_rows<Tiling::slices>([&](int slice, int half) {
        const float denominator = softmax.denominator(slice, half);
        factor[slice][half] = denominator == 0.0f ? 0.0f : __frcp_rn(denominator);
        factor[slice][half] *= softmax.o_scale[slice][half];
    });
    store_rows<__nv_bfloat16, Tiling>(
        softmax, reinterpret_cast<typename Tiling::template OutputTile<__nv_bfloat16> &>(shared.q),
        warp_row - first_row, options.out_bf16, options.out_bf16_strides, problem, warp_row, factor);
    return true;
}

// Divides by the sums and writes the outputs; splits write undivided sums. exact_sum, or null, gets the sums of the
// weights before rounding, laid out as row_sum. If the sums were computed again, it writes only those that were too
// small.
template <class Tiling, class Softmax>
__device__ __forceinline__ void write_results(Softmax &softmax, typename Tiling::Shared &shared, const Problem &problem,
                                              int first_row, int warp_row, float output_scale = 1.0f,
                                              float *exact_sum = nullptr) {
    const AttentionOptions &options = problem.options;
    if (Softmax::lowered && softmax.again) softmax.keep_small_sums();
    softmax.finish();
    float factor[Tiling::slices][2];                       // of the output
    if (Tiling::ends_quickly && !options.have_figures())   // in few instructions
        tile::for_rows<Tiling::slices>([&](int slice, int half) {
            const float denominator = softmax.denominator(slice, half);
            factor[slice][half] = output_scale * (denominator == 0.0f ? 0.0f : __frcp_rn(denominator));
            factor[slice][half] *= softmax.o_scale[slice][half];
        });
    else write_figures<Tiling>(softmax, problem, warp_row, output_scale, exact_sum, factor);

    // The output: 16-bit types by way of shared memory, float32 and parts directly.
    const int staged_row = warp_row - first_row;
    if (options.out_bf16)
        store_rows<__nv_bfloat16, Tiling>(
            softmax, reinterpret_cast<typename Tiling::template OutputTile<__nv_bfloat16> &>(shared.q), staged_row,
            options.out_bf16, options.out_bf16_strides, problem, warp_row, factor);
    // One test instead of three: the code of each output is far from that of the next, and must be fetched.
    if (Tiling::walks_rows && !options.out_f16 && !options.out_f32 && !options.partial) return;
    if (options.out_f16)
        store_rows<__half, Tiling>(softmax, reinterpret_cast<typename Tiling::template OutputTile<__half> &>(shared.q),
                                   staged_row, options.out_f16, options.out_f16_strides, problem, warp_row, factor);
    if (!options.out_f32 && !options.partial) return;
    tile::for_rows<Tiling::slices>([&](int slice, int half) {   // four lanes of a row write 32 bytes together
        const int row = warp_row + 16 * slice + tile::accumulator_row(2 * half);
        if (row >= problem.rows) return;
        float *target = options.partial ? options.partial + problem.split_row_at(row) * options.dim_v
                                        : options.out_f32 + problem.at(options.out_f32_strides, row);
        target += tile::accumulator_column(0);
#pragma unroll(Softmax::rolled ? 1 : Tiling::dim_v / tile::mma_columns)
        for (int j = 0; j < Tiling::dim_v / tile::mma_columns; ++j)
            if (j * tile::mma_columns < options.dim_v) {
                const float2 values = {softmax.o[slice][j][2 * half] * factor[slice][half],
                                       softmax.o[slice][j][2 * half + 1] * factor[slice][half]};
                if (Softmax::lowered && softmax.again) {
                    if (values.x == values.x) target[j * tile::mma_columns] = values.x;
                    if (values.y == values.y) target[j * tile::mma_columns + 1] = values.y;
                } else {
                    *reinterpret_cast<float2 *>(target + j * tile::mma_columns) = values;
                }
            }
    });
}

// The place of a block in the grid that Problem expects, which has a plane (z) for each sequence. The grid here has a
// plane for each item of the batch. Packed sequences, all in one plane, have blocks of `rows` rows of their own
// (sequences.cuh), so that the number of blocks grows with the rows, not with rows times sequences. Called by whole
// warps.
template <int rows>
__device__ inline uint3 place_of_unit(const AttentionOptions &options, uint3 block) {
    if (!options.query_starts) return block;
    const int last = gridDim.y - 1, unit = last - block.y;
    auto first = [&](int i) { return first_unit(__ldg(options.query_starts + i) * options.group, i, rows); };
    const int sequence = tile::last_that_holds(options.sequences, [&](int i) { return first(i) <= unit; });
    return make_uint3(block.x, last - (unit - first(sequence)), sequence);
}

// O = softmax(scale Q K^T) V for Tiling::rows rows of one head of K and V (and one split of its keys). Returns whether
// any sums were too small: then the block calls this once more with `again`.
template <class Tiling, class Found>
__device__ __forceinline__ bool attend_rows(typename Tiling::Shared &shared,
                                            const FloatOperands<typename Tiling::Element> &operands,
                                            const AttentionOptions &options, const Found &found, bool again) {
    using Element = typename Tiling::Element;
    using Stage = typename Tiling::Stage;
    using QueryTile = typename Tiling::QueryTile;
    using KeyTile = decltype(Stage::k);
    using ValueTile = decltype(Stage::v);
    using Softmax = OnlineSoftmaxIn16Bits<Element, Tiling::slices, Tiling::dim_v>;

    // Which rows, and which tiles of keys they see.
    const Problem problem(options, found());
    const int first_row = problem.row_block * Tiling::rows;
    if (first_row >= problem.rows) return false;   // packed sequences have different lengths
    const int end_row = min(first_row + Tiling::rows, problem.rows);
    const int warp_row = first_row + threadIdx.x / 32 * 16 * Tiling::slices;
    auto range = [&] {
        if constexpr (Tiling::hurries) return TileRange<Tiling::keys>(problem, found());
        else return TileRange<Tiling::keys>(problem, first_row, end_row);
    }();
    if (!Tiling::hurries && again) range.plain_end = range.plain_begin;

    // Start copying the first tiles and Q.
    const int begin_key = range.begin * Tiling::keys;
    RowCopier<Element, Tiling::threads, KeyTile> k_rows(
        shared.stage[0].k, operands.k + problem.at(operands.k_strides) + begin_key * operands.k_strides.key,
        operands.k_strides.key, options.dim);
    RowCopier<Element, Tiling::threads, ValueTile> v_rows;
    auto start_values = [&] {
        v_rows = {shared.stage[0].v, operands.v + problem.at(operands.v_strides) + begin_key * operands.v_strides.key,
                  operands.v_strides.key, options.dim_v};
    };
    if constexpr (!Tiling::hurries) start_values();
    auto copy_tile = [&](int index, uint32_t stage_offset) {
        k_rows.copy(stage_offset, problem.keys - index * Tiling::keys);
        v_rows.copy(stage_offset, problem.keys - index * Tiling::keys);
    };

    // Blocks without visible keys copy nothing and write zeros. The others copy a tile before Q, which is smaller and
    // arrives sooner. Those that hurry copy the first values behind what the first scores need, since all blocks of
    // such a launch wait for the L2 at once.
    const bool any = range.begin < range.end;
    if constexpr (Tiling::hurries) {
        if (any) {
            k_rows.copy_straight(0, problem.keys - begin_key);
            copy_queries_in_a_hurry<Element, Tiling::threads>(shared.q, operands.q, operands.q_strides, problem,
                                                              first_row, range.first_query);
        }
        ptx::cp_async_commit_group();
        if (any) {
            start_values();
            v_rows.copy_straight(0, problem.keys - begin_key);
        }
    } else if (any) {
        copy_tile(range.begin, 0);
        copy_queries<Element, Tiling::threads>(shared.q, operands.q, operands.q_strides, problem, first_row);
    }
    ptx::cp_async_commit_group();
    if constexpr (Tiling::fills_q) {
        if (range.begin + 1 < range.end) {
            const int rows = problem.keys - begin_key - Tiling::keys;
            if constexpr (Tiling::hurries)
                k_rows.copy_straight(sizeof(Stage), rows), v_rows.copy_straight(sizeof(Stage), rows);
            else copy_tile(range.begin + 1, sizeof(Stage));
        }
        ptx::cp_async_commit_group();
    }
    if constexpr (Tiling::hurries) {
        range.find_plain(problem);
        if (again) range.plain_end = range.plain_begin;
    }

    // The softmax, and Q in registers.
    Softmax softmax;
    softmax.start(headroom_in_16_bits(options.partial != nullptr));
    if constexpr (Softmax::lowered) softmax.again = again;
    WarpQueries<QueryTile, Tiling::slices, Tiling::dim / 16, Tiling::keeps_q> q{
        tile::address_a(shared.q) + uint32_t((warp_row - first_row) * (sizeof(shared.q) / Tiling::rows))};
    if (Tiling::keeps_q && any) {
        ptx::cp_async_wait_group<Tiling::stages - (Tiling::hurries ? 1 : 2)>();
        ptx::bar_sync();   // all threads see Q and, where blocks hurry, the first keys
        q.keep();
    }

    // A tile: scores, masks, softmax, and the weighted values.
    const uint32_t k = tile::address_b(shared.stage[0].k), v = tile::address_b_transposed(shared.stage[0].v);
    const bool idle = warp_row >= problem.rows;
    int warp_end = 0;   // of the keys that the warp sees; not needed where no tile has a mask
    if (!Tiling::hurries || range.plain_begin > range.begin || range.plain_end < range.end)
        warp_end = problem.end_visible(problem.query_of(min(warp_row + 16 * Tiling::slices, problem.rows) - 1));
    const float factor = score_factor(problem, options.scale);
    uint32_t stage_offset = 0;   // of the current tile
    auto step = [&](int index, auto masked, auto waits_late) {
        auto wait = [&] {
            ptx::cp_async_wait_group<Tiling::stages - 2>();
            ptx::bar_sync();   // all threads see this tile and have read the stage that is filled next
        };
        if constexpr (!waits_late) wait();
        const uint32_t current = stage_offset;
        uint32_t filled;
        if constexpr (Tiling::fills_q) {   // stages 0, 1, -1 in turn; after this barrier Q is in registers
            stage_offset = current == sizeof(Stage) ? -sizeof(Stage) : current + sizeof(Stage);
            filled = int(current) < 0 ? sizeof(Stage) : current - sizeof(Stage);
        } else {
            filled = stage_offset = sizeof(Stage) - stage_offset;
        }
        auto weave_next = [&] {
            const bool exists = index + 1 < range.end;
            k_rows.copy_if(exists, filled, problem.keys - (index + 1) * Tiling::keys);
            v_rows.copy_if(exists, filled, problem.keys - (index + 1) * Tiling::keys);
        };
        auto copy_next = [&] {
            if constexpr (Tiling::weaves) weave_next();
            else if (index + Tiling::stages - 1 < range.end) copy_tile(index + Tiling::stages - 1, filled);
            ptx::cp_async_commit_group();
        };
        if constexpr (Tiling::copies_early && !waits_late) copy_next();
        // A warp that has no rows, or whose rows see nothing of this tile, only copies. All warps wait at one place.
        const bool copies_only = idle || (masked && index * Tiling::keys >= warp_end);
        if (!waits_late && copies_only) {
            if constexpr (!Tiling::copies_early) copy_next();
            return;
        }
        tile::Accumulator s[Tiling::slices][Tiling::keys / tile::mma_columns];
        if (!(waits_late && copies_only)) {
            // The copies overlap the last of these MMAs. Woven ones stand before them at 64 columns and behind them at
            // 128. There a branch that is never taken keeps ptxas from loading so much ahead of it that the loop
            // spills.
            if constexpr (Tiling::weaves && Tiling::dim == 64) {
                multiply_scores<Element, Tiling::dim, KeyTile>(s, q, k + current, weave_next);
                ptx::cp_async_commit_group();
            } else if constexpr (Tiling::weaves) {
                multiply_scores<Element, Tiling::dim, KeyTile>(s, q, k + current, [&] {
                    if (options.keys < 0) ptx::bar_sync();
                });
                copy_next();
            } else {
                multiply_scores<Element, Tiling::dim, KeyTile>(s, q, k + current);
                if constexpr (!Tiling::copies_early) copy_next();
            }
            if constexpr (masked)
                mask_scores<tile::NaturalKeys, true>(s, problem, warp_row, index * Tiling::keys, options.scale);
            softmax.take(s, factor);
        }
        if constexpr (waits_late) {
            wait(), copy_next();
            if (copies_only) return;
        }
        accumulate_values<Element, Tiling::dim_v, ValueTile, masked && Softmax::lowered>(softmax, s, v + current);
    };

    // All tiles. Those without masks have a loop of their own.
    int index = range.begin;
    if constexpr (Tiling::hurries)
        if (range.plain_begin <= index && index < range.plain_end)
            step(index++, std::false_type{}, std::true_type{});   // its values may still be on their way
    for (; index < range.end; ++index) {
        for (; range.plain_begin <= index && index < range.plain_end; ++index)
            step(index, std::false_type{}, std::false_type{});
        if (index < range.end) step(index, std::true_type{}, std::false_type{});
    }

    // The usual end, in few instructions: where few queries meet many keys, code that runs once comes from memory,
    // which copies keep busy. Parts are on their way while the sums are tested.
    if constexpr (Tiling::exits_early) {
        const bool written = !again && write_parts_quickly<Tiling>(softmax, problem, warp_row);
        const bool suspect = again || (!idle && any_sum_is_extreme<Softmax>(softmax.o, options.partial));
        if (!ptx::bar_red_or(suspect) &&
            (written || write_quickly<Tiling>(softmax, shared, problem, first_row, warp_row)))
            ptx::exit();
    }

    // Check whether sums lost bits, then write the results.
    bool lost = false;
    if constexpr (Softmax::lowered) {
        if (!again && !idle) {
            const Element *values = operands.v + problem.at(operands.v_strides) + tile::accumulator_column(0);
            lost = sums_are_too_small(softmax, softmax.o, problem, warp_row, begin_key,
                                      min(range.end * Tiling::keys, problem.keys), [&](int key, int j) {
                                          return *reinterpret_cast<const uint32_t *>(
                                              values + key * operands.v_strides.key + j * tile::mma_columns);
                                      });
        }
        lost = ptx::bar_red_or(lost);   // also the barrier that the other branch has
    } else if constexpr ((Tiling::dim != Tiling::dim_v && !Tiling::keeps_q) || Tiling::fills_q) {
        ptx::bar_sync();   // all warps have read the Q, keys and values that output rows overwrite
    }
    write_results<Tiling>(softmax, shared, problem, first_row, warp_row);
    __syncwarp();   // lanes without rows reconverge
    return lost;
}

// The place of a block of `rows` rows in any launch.
template <int rows>
__device__ inline Place place_of_any(const AttentionOptions &options, uint3 block) {
    const Problem problem(options, place_of_unit<rows>(options, block));
    const int first_row = problem.row_block * rows, end_row = min(first_row + rows, problem.rows);
    return {problem.batch,
            problem.head,
            problem.split,
            problem.row_block,
            problem.first_query,
            problem.queries,
            problem.first_key,
            problem.keys,
            problem.query_of(first_row),
            problem.query_of(end_row - 1),
            keys_of_split(options)};
}

// Attention of the rows of a block, in one pass or two.
template <class Tiling>
__device__ inline void attention(typename Tiling::Shared &shared,
                                 const FloatOperands<typename Tiling::Element> &operands,
                                 const AttentionOptions &options) {
    using Element = typename Tiling::Element;
    constexpr bool lowered = OnlineSoftmaxIn16Bits<Element, Tiling::slices, Tiling::dim_v>::lowered;
    if constexpr (Tiling::hurries) {
        const auto block = [] { return lowered ? ptx::block() : uint3(blockIdx); };   // of this pass: see ptx::block()
        // The place of other than dense launches is found at the end of the loop, so that this code does not stand
        // ahead of the first copies. The assembler must not know what comes next: it would move the code.
        enum { done, compute_again, find };
        bool again = false, found = false;
        Place place;
#pragma unroll 1
        while (true) {
            const bool dense = options.are_dense(Tiling::rows);
            int next = find;
            if (dense || found) {
                if (dense) place = Place::of_dense(options, block(), Tiling::rows);
                next =
                    attend_rows<Tiling>(shared, operands, options, [&] { return place; }, again) ? compute_again : done;
            }
            next = ptx::mov_b32(next);
            if (next == done) return;
            if (next == compute_again) {
                ptx::bar_sync();   // the output staged over the tiles has been written
                again = true;
            } else {
                place = place_of_any<Tiling::rows>(options, block());
                found = true;
            }
        }
    } else {
        const auto attend = [&](const auto &unit, bool again) {
            return attend_rows<Tiling>(shared, operands, options, unit, again);
        };
        if constexpr (lowered) {
            const auto unit = [&] { return place_of_unit<Tiling::rows>(options, ptx::block()); };
#pragma unroll 1
            for (bool again = false; attend(unit, again); again = true)
                ptx::bar_sync();   // the output staged over the tiles has been written
        } else {
            attend([&] { return place_of_unit<Tiling::rows>(options, uint3(blockIdx)); }, false);
        }
    }
}

}   // namespace op
