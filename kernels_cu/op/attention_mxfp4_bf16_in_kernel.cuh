// Fused attention that quantizes Q and K to MXFP4 as it loads them: S = Q K^T by block-scaled MMA on e2m1 in 8-bit
// containers, online softmax in registers, P V by bf16 MMA. K is quantized once per block of 128 queries.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/mma.cuh"
#include "../tile/format.cuh"
#include "../tile/fragment.cuh"
#include "../tile/scale.cuh"
#include "../tile/shared.cuh"

namespace op {

constexpr int attention_warps = 8;
constexpr int attention_threads = 32 * attention_warps;
constexpr int attention_queries = attention_warps * tile::mma_rows;   // one 16-row slice to a warp

// Keys to a tile: as many as leave room for float32 input in 99 KiB and for the accumulators in the registers.
template <int dim>
constexpr int attention_keys = dim <= 128 ? 64 : 32;

// One problem: Q [queries, dim], K and V [keys, dim] of one batch and head, contiguous, 16-byte aligned.
template <class Element>
struct InKernelOperands {
    const Element *q, *k, *v;
    int queries, keys;
};

// ---------------------------------------------------------------------------------------------------------------------
// MXFP4 tiles

// Rows of dim values in MXFP4: e2m1 in 8-bit containers (a row is dim bytes) and the scales as words.
template <int rows_, int dim_>
struct Mxfp4Tile {
    static constexpr int rows = rows_, dim = dim_;
    tile::SharedTile<rows, dim> codes;
    tile::ScaleWords<rows, dim / tile::mx_block> scales;
};

// Four registers of containers, sixteen e2m1 values in order, from the sixteen floats of half an MX block. Where the
// block's scale is NaN, codes are 0.
__device__ inline uint4 encode_half_block(const float (&values)[16], uint32_t scale) {
    const float reciprocal = tile::ue8m0_reciprocal(scale);
    const uint32_t finite = scale == tile::ue8m0_nan ? 0 : 0xffffffffu;
    uint32_t words[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float scaled[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) scaled[i] = values[8 * half + i] * reciprocal;
        const uint32_t packed = ptx::cvt_rn_satfinite_e2m1x8_f32(scaled) & finite;
        tile::e2m1_containers(packed, words[2 * half], words[2 * half + 1]);
    }
    return {words[0], words[1], words[2], words[3]};
}

// Fills `target` with the MXFP4 of the rows whose 16-byte chunk c of row r is source(r, c). Called by the whole block; the
// caller puts a barrier before the tile is read.
template <class Element, class Target, class Source>
__device__ inline void quantize_rows(Target &target, Source &&source) {
    using Lanes = tile::QuantizeLanes<decltype(Target::scales)::blocks_per_word>;
    constexpr int words = decltype(Target::scales)::count;
    constexpr int slices = Target::rows / Lanes::rows;
    constexpr int chunk_values = tile::elements_per_chunk<Element>;

    for (int item = threadIdx.x / 32; item < slices * words; item += attention_warps) {
        const int row = item % slices * Lanes::rows + Lanes::row();
        const int word = item / slices;
        uint32_t scales = 0;
#pragma unroll
        for (int pass = 0; pass < Lanes::passes; ++pass) {
            const int half_block = Lanes::half_block(word, pass);
            float values[16];
#pragma unroll
            for (int i = 0; i < 16 / chunk_values; ++i) {
                float some[chunk_values];
                tile::unpack(source(row, half_block * (16 / chunk_values) + i), some, Element{});
#pragma unroll
                for (int j = 0; j < chunk_values; ++j) values[i * chunk_values + j] = some[j];
            }
            const uint32_t scale = tile::mx_scale<tile::E2m1>(Lanes::block_amax(tile::amax_of(values)), tile::ScaleRule::floor);
            target.codes.at(row, half_block) = encode_half_block(values, scale);
            scales |= Lanes::placed(scale, pass);
        }
        scales = Lanes::gathered(scales);
        if (Lanes::stores_scales()) target.scales.words[word][row] = scales;
    }
}

// The Q operand of one warp: its 16 rows and their scales, in registers for the whole kernel.
template <int dim>
struct QueryFragments {
    static constexpr int steps = dim / 32;   // MMAs deep
    tile::FragmentA codes[steps];
    uint32_t scales[tile::operand_a_registers<dim / tile::mx_block>];

    template <class Tile>
    __device__ void load(const Tile &source, int first_row) {
#pragma unroll
        for (int step = 0; step < steps; ++step) tile::load_a(codes[step], source.codes, first_row, 2 * step);
#pragma unroll
        for (int i = 0; i < tile::operand_a_registers<steps>; ++i) scales[i] = source.scales.operand_a(2 * i, first_row);
    }
};

// s = Q K^T of a warp's 16 queries and all keys of a tile; s[j] covers keys 8 j .. 8 j + 7.
template <int dim, class Tile>
__device__ inline void multiply_scores(tile::Accumulator (&s)[Tile::rows / tile::mma_columns],
                                       const QueryFragments<dim> &q, const Tile &k) {
    constexpr int per_word = decltype(Tile::scales)::blocks_per_word;
#pragma unroll
    for (auto &accumulator : s)
#pragma unroll
        for (float &element : accumulator) element = 0.0f;
    static_for<Tile::rows / 32>([&](auto group) {   // 32 keys: four tiles of 8, whose scales stand in one register
        static_for<decltype(Tile::scales)::count>([&](auto word) {
            const uint32_t k_scales = k.scales.operand_b(word, 32 * group);
            static_for<per_word>([&](auto byte) {
                constexpr int step = word * per_word + byte;
                const auto a = ptx::prepare_mxf8f6f4_a<ptx::E2m1, byte, word % 2>(q.codes[step], q.scales[word / 2]);
                static_for<2>([&](auto pair) {
                    tile::FragmentB b[2];
                    tile::load_b(b, k.codes, 32 * group + 16 * pair, 2 * step);
                    static_for<2>([&](auto half) {
                        constexpr int thread = 2 * pair + half;
                        ptx::mma_m16n8k32_mxf8f6f4<ptx::E2m1, ptx::E2m1, byte, word % 2, byte, thread>(s[4 * group + thread], a, b[half],
                                                                                                       k_scales);
                    });
                });
            });
        });
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Tiles of K and V as they come

// Starts copying rows first .. first + rows - 1 of a matrix [valid, dim] into a tile; rows from `valid` on become zeros.
template <class Element, int dim, class Tile>
__device__ inline void copy_rows(Tile &target, const Element *matrix, int first, int valid) {
    for (int i = threadIdx.x; i < Tile::rows * Tile::row_chunks; i += attention_threads) {
        const int row = i / Tile::row_chunks, chunk = i % Tile::row_chunks;
        const bool present = first + row < valid;
        const Element *source = matrix + size_t(present ? first + row : 0) * dim + chunk * tile::elements_per_chunk<Element>;
        ptx::cp_async_cg_16(target.address(row, chunk), source, present);
    }
}

// A tile of V in bf16 from one in another type. Eight lanes take one chunk of eight rows, which keeps to all banks both
// where they read and where they write.
template <class Element, class Target, class Source>
__device__ inline void convert_to_bf16(Target &target, Source &source) {
    constexpr int parts = 8 / tile::elements_per_chunk<Element>;   // chunks read for one written
    for (int i = threadIdx.x; i < Target::rows * Target::row_chunks; i += attention_threads) {
        const int row = i % Target::rows, chunk = i / Target::rows;
        float values[8];
#pragma unroll
        for (int part = 0; part < parts; ++part) {
            float some[8 / parts];
            tile::unpack(source.at(row, chunk * parts + part), some, Element{});
#pragma unroll
            for (int j = 0; j < 8 / parts; ++j) values[part * (8 / parts) + j] = some[j];
        }
        target.at(row, chunk) = tile::pack(values, __nv_bfloat16{});
    }
}

// Shared memory of a block. Q is only there until every warp has its fragments.
template <class Element, int dim, bool with_values>
struct AttentionShared {
    static constexpr int keys = attention_keys<dim>;
    static constexpr bool converts_v = !std::is_same_v<Element, __nv_bfloat16>;
    using Raw = tile::SharedTile<keys, dim * sizeof(Element)>;
    using ValueTile = tile::SharedTile<keys, dim * sizeof(__nv_bfloat16)>;
    struct Nothing {};

    union {
        Mxfp4Tile<attention_queries, dim> q;
        struct {
            Raw k_raw;                                                          // as it came
            std::conditional_t<with_values, Raw, Nothing> v_raw;                // bf16 is used from here
            Mxfp4Tile<keys, dim> k;
            std::conditional_t<with_values && converts_v, ValueTile, Nothing> v;   // f32 and f16 pass through here
        };
    };
};

// ---------------------------------------------------------------------------------------------------------------------
// Softmax

// The running softmax of a warp's 16 queries: o is the unnormalized output, [h] belongs to rows g + 8 h of this lane.
template <int dim>
struct Softmax {
    tile::Accumulator o[dim / tile::mma_columns];
    float row_max[2];   // of the scaled scores, in units of log2; the same in the four lanes of a row
    float row_sum[2];   // of this lane's columns only, until finish()

    __device__ void start() {
#pragma unroll
        for (auto &accumulator : o)
#pragma unroll
            for (float &element : accumulator) element = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            row_max[half] = -INFINITY;
            row_sum[half] = 0.0f;
        }
    }

    // Turns scaled scores into probabilities below a new maximum and brings o and row_sum under it.
    template <int tiles>
    __device__ void take(tile::Accumulator (&s)[tiles]) {
        float rescale[2], base[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float tile_max = -INFINITY;
#pragma unroll
            for (auto &scores : s) tile_max = fmaxf(tile_max, fmaxf(scores[2 * half], scores[2 * half + 1]));
            tile_max = tile::reduce_row(tile_max, [](float a, float b) { return fmaxf(a, b); });
            const float new_max = fmaxf(row_max[half], tile_max);
            base[half] = new_max == -INFINITY ? 0.0f : new_max;   // no key yet: -inf less -inf would be NaN
            rescale[half] = ptx::ex2_approx_ftz_f32(row_max[half] - base[half]);
            row_max[half] = new_max;
            row_sum[half] *= rescale[half];
        }
#pragma unroll
        for (auto &scores : s)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[i] = ptx::ex2_approx_ftz_f32(scores[i] - base[i / 2]);
                row_sum[i / 2] += scores[i];
            }
#pragma unroll
        for (auto &accumulator : o)
#pragma unroll
            for (int i = 0; i < 4; ++i) accumulator[i] *= rescale[i / 2];
    }

    // o += P V for a tile of V [keys, dim] in bf16.
    template <int tiles, class Tile>
    __device__ void accumulate(const tile::Accumulator (&p)[tiles], const Tile &v) {
        static_for<tiles / 2>([&](auto step) {   // 16 keys
            tile::FragmentA a;
            tile::accumulators_to_a(a, p[2 * step], p[2 * step + 1], __nv_bfloat16{});
            static_for<dim / 16>([&](auto columns) {
                tile::FragmentB b[2];
                tile::load_b_transposed(b, v, 16 * step, 2 * columns);
                static_for<2>([&](auto half) { ptx::mma_m16n8k16_bf16(o[2 * columns + half], a, b[half]); });
            });
        });
    }

    // Adds up row_sum over the lanes of each row.
    __device__ void finish() {
#pragma unroll
        for (float &sum : row_sum) sum = tile::reduce_row(sum, [](float a, float b) { return a + b; });
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The kernels

// Quantizes a block's queries and hands each warp its fragments. Rows from `queries` on are zeros.
template <class Element, int dim, class Shared>
__device__ inline void load_queries(QueryFragments<dim> &fragments, Shared &shared, const Element *q, int first, int queries) {
    quantize_rows<Element>(shared.q, [&](int row, int chunk) {
        if (first + row >= queries) return uint4{};
        const Element *source = q + size_t(first + row) * dim + chunk * tile::elements_per_chunk<Element>;
        return __ldg(reinterpret_cast<const uint4 *>(source));
    });
    ptx::bar_sync();   // all rows of Q are written before a warp reads its own
    fragments.load(shared.q, threadIdx.x / 32 * tile::mma_rows);
    ptx::bar_sync();   // all warps have their fragments before K is copied over Q
}

// The first key that query `row` does not see. Causal masks align the last query with the last key.
__device__ inline int visible_keys(int row, int queries, int keys, bool causal) {
    return causal ? min(keys, row + keys - queries + 1) : keys;
}

// O = softmax(scale Q K^T) V for 128 queries of one head. `out_bf16`, `out_f32` [queries, dim] and `lse` [queries] are
// written where they are not null; a query that sees no key gets 0 and -inf.
template <class Element, int dim>
__device__ inline void attention_mxfp4_bf16_in_kernel(AttentionShared<Element, dim, true> &shared, const InKernelOperands<Element> &operands,
                                            __nv_bfloat16 *out_bf16, float *out_f32, float *lse, float scale, bool causal) {
    using Shared = AttentionShared<Element, dim, true>;
    constexpr int keys_per_tile = attention_keys<dim>;
    constexpr float log2_e = 1.4426950408889634f, ln_2 = 0.6931471805599453f;
    const int queries = operands.queries, keys = operands.keys;
    const int first_query = blockIdx.x * attention_queries;
    const int warp_query = first_query + threadIdx.x / 32 * tile::mma_rows;

    QueryFragments<dim> q;
    load_queries<Element, dim>(q, shared, operands.q, first_query, queries);

    Softmax<dim> softmax;
    softmax.start();
    const int last_query = min(first_query + attention_queries, queries) - 1;
    const int tiles = ceil_div(max(visible_keys(last_query, queries, keys, causal), 0), keys_per_tile);
    const int unmasked_keys = visible_keys(warp_query, queries, keys, causal);   // every query of the warp sees these

    if (tiles > 0) copy_rows<Element, dim>(shared.k_raw, operands.k, 0, keys);
    ptx::cp_async_commit_group();
    for (int tile_index = 0; tile_index < tiles; ++tile_index) {
        const int first_key = tile_index * keys_per_tile;

        ptx::cp_async_wait_group<0>();
        ptx::bar_sync();   // K has landed for everyone; everyone is done with V and the codes of the tile before
        copy_rows<Element, dim>(shared.v_raw, operands.v, first_key, keys);
        ptx::cp_async_commit_group();

        quantize_rows<Element>(shared.k, [&](int row, int chunk) { return shared.k_raw.at(row, chunk); });
        ptx::bar_sync();   // the codes of K are complete; nobody reads K as it came any more
        if (tile_index + 1 < tiles) copy_rows<Element, dim>(shared.k_raw, operands.k, first_key + keys_per_tile, keys);
        ptx::cp_async_commit_group();

        tile::Accumulator s[keys_per_tile / tile::mma_columns];
        multiply_scores(s, q, shared.k);
#pragma unroll
        for (auto &scores : s)
#pragma unroll
            for (float &score : scores) score *= scale * log2_e;
        if (first_key + keys_per_tile > unmasked_keys) {
#pragma unroll
            for (int j = 0; j < keys_per_tile / tile::mma_columns; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int key = first_key + j * tile::mma_columns + tile::accumulator_column(i);
                    const int query = warp_query + tile::accumulator_row(i);
                    if (key >= visible_keys(query, queries, keys, causal)) s[j][i] = -INFINITY;
                }
        }
        softmax.take(s);

        ptx::cp_async_wait_group<1>();
        ptx::bar_sync();   // V has landed for everyone
        if constexpr (Shared::converts_v) {
            convert_to_bf16<Element>(shared.v, shared.v_raw);
            ptx::bar_sync();   // V in bf16 is complete
            softmax.accumulate(s, shared.v);
        } else {
            softmax.accumulate(s, shared.v_raw);
        }
    }
    softmax.finish();

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int query = warp_query + tile::accumulator_row(2 * half);
        if (query >= queries) continue;
        const float sum = softmax.row_sum[half];
        const float normalize = sum == 0.0f ? 0.0f : ptx::rcp_approx_ftz_f32(sum);
#pragma unroll
        for (int j = 0; j < dim / tile::mma_columns; ++j) {
            const size_t at = size_t(query) * dim + j * tile::mma_columns + tile::accumulator_column(0);
            const float left = softmax.o[j][2 * half] * normalize, right = softmax.o[j][2 * half + 1] * normalize;
            if (out_bf16) *reinterpret_cast<uint32_t *>(out_bf16 + at) = ptx::cvt_rn_bf16x2_f32(right, left);
            if (out_f32) *reinterpret_cast<float2 *>(out_f32 + at) = {left, right};
        }
        if (lse && tile::accumulator_column(0) == 0)
            lse[query] = sum == 0.0f ? -INFINITY : softmax.row_max[half] * ln_2 + ptx::lg2_approx_ftz_f32(sum) * ln_2;
    }
}

// scores[queries][keys] = Q K^T of the same tiles, unscaled and unmasked, for 128 queries of one head.
template <class Element, int dim>
__device__ inline void probe_scores_mxfp4(AttentionShared<Element, dim, false> &shared, const InKernelOperands<Element> &operands,
                                          float *scores) {
    constexpr int keys_per_tile = attention_keys<dim>;
    const int queries = operands.queries, keys = operands.keys;
    const int first_query = blockIdx.x * attention_queries;
    const int warp_query = first_query + threadIdx.x / 32 * tile::mma_rows;

    QueryFragments<dim> q;
    load_queries<Element, dim>(q, shared, operands.q, first_query, queries);
    for (int first_key = 0; first_key < keys; first_key += keys_per_tile) {
        copy_rows<Element, dim>(shared.k_raw, operands.k, first_key, keys);
        ptx::cp_async_commit_group();
        ptx::cp_async_wait_group<0>();
        ptx::bar_sync();   // K has landed for everyone; everyone is done with the codes of the tile before
        quantize_rows<Element>(shared.k, [&](int row, int chunk) { return shared.k_raw.at(row, chunk); });
        ptx::bar_sync();   // the codes of K are complete; nobody reads K as it came any more

        tile::Accumulator s[keys_per_tile / tile::mma_columns];
        multiply_scores(s, q, shared.k);
#pragma unroll
        for (int j = 0; j < keys_per_tile / tile::mma_columns; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int query = warp_query + tile::accumulator_row(i);
                const int key = first_key + j * tile::mma_columns + tile::accumulator_column(i);
                if (query < queries && key < keys) scores[size_t(query) * keys + key] = s[j][i];
            }
    }
}

}  // namespace op
