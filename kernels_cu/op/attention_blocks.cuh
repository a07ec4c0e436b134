// Fused attention on operands in block formats: block-scaled MMAs for S = Q K^T and O = P V, with P quantized in registers; or V
// in 16 bits, and P rounded to it.
//
// K and V come as tiles that one bulk copy each brings to shared memory (tile/block_tiles.cuh). The columns of S stand for keys
// in the order that makes P an operand where it lies. How P is made of scores and multiplied by V is a WeightedValues for each
// format of V.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernel.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/bulk.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/target.cuh"
#include "../tile/block_tiles.cuh"
#include "../tile/expanded.cuh"
#include "../tile/fragment.cuh"
#include "attention.cuh"
#include "problem.cuh"
#include "softmax.cuh"

namespace op {

// Q in codes and scales, K and V in tiles, and what NVFP4 multiplies all values by (null: nothing). mean_scores (or null): the
// scores that smoothing took from Q, in the units of a product of codes and scales; [batch, heads_kv, group, query_blocks, keys
// of all tiles].
struct BlockOperands {
    const uint8_t *q_codes, *q_scales, *k_tiles, *v_tiles;
    const float *q_global, *k_global, *v_global, *mean_scores;
    int q_bytes, q_blocks, tiles, query_blocks;   // of a row of Q; of a head of K and V, and of Q
    StridesQ q_codes_strides, q_scales_strides;
};

// ---------------------------------------------------------------------------------------------------------------------
// Probabilities as operand A

// P of 16 rows and `tiles` column tiles of S.
template <class Format, int tiles>
struct ProbabilityFragments {
    static constexpr int steps = 8 * tiles / Format::depth;
    tile::FragmentA codes[steps];
    uint32_t scales[steps];
};

// The largest of the scores of column tiles `first` .. first + count - 1 in one row of this lane; NaN where one is, so that a
// scale made of it is NaN, for e2m1 has none.
template <int first, int count, int tiles>
__device__ inline float lane_max(const tile::Accumulator (&s)[tiles], int half) {
    float result = ptx::max_nan_f32(s[first][2 * half], s[first][2 * half + 1]);
#pragma unroll
    for (int j = first + 1; j < first + count; ++j)
        result = ptx::max_nan_f32(result, ptx::max_nan_f32(s[j][2 * half], s[j][2 * half + 1]));
    return result;
}

// Eight scores of a row, of column tiles first .. first + 3, as probabilities weight(score).
template <int first, int tiles, class Weight>
__device__ inline void exponentials(float (&p)[8], const tile::Accumulator (&s)[tiles], int half, Weight &&weight) {
#pragma unroll
    for (int i = 0; i < 8; ++i) p[i] = weight(s[first + i / 2][2 * half + i % 2]);
}

__device__ inline float sum_of(const float (&p)[8]) {
    return ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
}

// How P becomes codes and scales. `headroom`: row_max is so many steps of 2 below the rounded-up maximum, so that the scale
// range of P is used from its top and a tail far below the maximum survives.
//
// encode() takes the scores of 16 rows; group_max[h][half] is the largest score of 32 keys (h) in a row, reduced over as many
// lanes of the quad as share a scale; row_max is that of the row already. Codes and scales are the same under any row_max, but
// for a power of two: what is rounded to them comes from Exponents, or from exponents without a row_max in them. Where `sums`, P
// before it is rounded is added to row_sum, for the logarithm of the sum alone.
template <class Format>
struct Probabilities;

// e4m3 without a scale of its own: P is at most 2^8 of e4m3's 448.
template <>
struct Probabilities<tile::Mxfp8> {
    using Order = tile::KeysByFours;
    static constexpr float headroom = 8.0f;
    static constexpr bool scaled = false;
    static constexpr uint32_t one = 0x38383838u, unit_scale = 0x7f7f7f7fu;

    __device__ static float shared_max(float lane_max) { return lane_max; }

    template <bool masked, bool sums, int tiles>
    __device__ static void encode(ProbabilityFragments<tile::Mxfp8, tiles> &p, const tile::Accumulator (&s)[tiles],
                                  const float (&)[tiles / 4][2], const float (&row_max)[2], float (&row_sum)[2], float factor) {
        static_for<tiles / 4>([&](auto step) {
            p.scales[step] = unit_scale;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Exponents below(row_max[half]);
                float values[8];
                exponentials<4 * step>(values, s, half, [&](float score) { return below.weight(score, factor); });
                p.codes[step][half] = ptx::cvt_rn_satfinite_e4m3x4_f32(values);
                p.codes[step][2 + half] = ptx::cvt_rn_satfinite_e4m3x4_f32(values + 4);
                if constexpr (sums) row_sum[half] += sum_of(values);
            }
        });
    }
};

// e2m1 with one power of two for 32 keys: the smallest under which nothing saturates.
template <>
struct Probabilities<tile::Mxfp4> {
    using Order = tile::KeysByEights;
    static constexpr float headroom = 0.0f;
    static constexpr bool scaled = true;
    static constexpr uint32_t one = 0x22222222u, unit_scale = 0x7f7f7f7fu;

    __device__ static float shared_max(float lane_max) {
        return tile::reduce_row(lane_max, [](float a, float b) { return ptx::max_nan_f32(a, b); });
    }

    template <bool masked, bool sums, int tiles>
    __device__ static void encode(ProbabilityFragments<tile::Mxfp4, tiles> &p, const tile::Accumulator (&s)[tiles],
                                  const float (&group_max)[tiles / 4][2], const float (&row_max)[2], float (&row_sum)[2],
                                  float factor) {
        constexpr float log2_6 = 2.584962500721156f, to_scale = 0x1.8p23f + 127.0f;   // leaves a whole number + 127 in the low bits
        static_for<tiles / 8>([&](auto step) {
            uint32_t words[2];   // of rows g and g + 8
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Exponents below(row_max[half]);
                uint32_t scale[2];
                static_for<2>([&](auto h) {
                    // The block's exponent below the row's, rounded up; beyond 2^-40 a block counts as that much.
                    const float exponent = below(group_max[2 * step + h][half], factor) - log2_6;
                    const float rounded = __fadd_ru(ptx::max_nan_f32(exponent, -40.0f), to_scale);
                    const float base = row_max[half] + (rounded - to_scale);
                    float values[8];
                    exponentials<8 * step + 4 * h>(values, s, half, [&](float score) { return ptx::ex2_approx_ftz_f32(fmaf(score, factor, -base)); });
                    p.codes[step][2 * h + half] = ptx::cvt_rn_satfinite_e2m1x8_f32(values);
                    scale[h] = __float_as_uint(rounded);
                    if constexpr (sums) row_sum[half] = fmaf(__uint_as_float(scale[h] << 23), sum_of(values), row_sum[half]);
                });
                words[half] = __byte_perm(scale[0], scale[1], 0x7740);
            }
            p.scales[step] = ptx::laneid() % 2 ? words[1] : words[0];   // even lanes carry row g, odd ones row g + 8
        });
    }
};

// e2m1 with one ue4m3 scale for 16 keys, which is at most 2^11 / 6 of ue4m3's 448.
template <>
struct Probabilities<tile::Nvfp4> {
    using Order = tile::KeysByEights;
    static constexpr float headroom = 11.0f;
    static constexpr bool scaled = true;
    static constexpr uint32_t one = 0x22222222u, unit_scale = 0x38383838u;

    // Two lanes of a quad hold the 16 keys of a block.
    __device__ static float shared_max(float lane_max) { return ptx::max_nan_f32(lane_max, ptx::shfl_sync_bfly_f32(lane_max, 1)); }

    template <bool masked, bool sums, int tiles>
    __device__ static void encode(ProbabilityFragments<tile::Nvfp4, tiles> &p, const tile::Accumulator (&s)[tiles],
                                  const float (&group_max)[tiles / 4][2], const float (&row_max)[2], float (&row_sum)[2],
                                  float factor) {
        constexpr float log2_6 = 2.584962500721156f;
        static_for<tiles / 8>([&](auto step) {
            float scales[4];   // of (row g, first 32 keys), (g, last 32), (g + 8, first), (g + 8, last)
            static_for<2>([&](auto h) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float largest = group_max[2 * step + h][half];
                    float base = fmaf(largest, factor, -log2_6);
                    if (masked) base = ptx::max_nan_f32(base, row_max[half] - 40.0f);   // a block without visible keys
                    float values[8];
                    exponentials<8 * step + 4 * h>(values, s, half, [&](float score) { return ptx::ex2_approx_ftz_f32(fmaf(score, factor, -base)); });
                    p.codes[step][2 * h + half] = ptx::cvt_rn_satfinite_e2m1x8_f32(values);
                    scales[2 * half + h] = Exponents(row_max[half]).weight(base, 1.0f);
                    if constexpr (sums) row_sum[half] = fmaf(scales[2 * half + h], sum_of(values), row_sum[half]);
                }
            });
            // A lane has every second block of both rows, its neighbour at distance 2 the others.
            const uint32_t own = ptx::cvt_rn_satfinite_e4m3x4_f32(scales), other = ptx::shfl_sync_bfly_b32(own, 2);
            p.scales[step] = __byte_perm(own, other, ptx::laneid() % 2 ? 0x7362 : 0x5140);
        });
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Softmax and O = P V

// The running softmax by the format of V: the order of the keys, start(), add() of a tile, denominator(), and what OnlineSoftmax
// has. sums_apart: sums of exact P are another work than the denominator's, and are kept where `sums` asks for them.
//
// In block formats P is quantized: the denominator is the sum of P as it is multiplied, codes times scales, which is one more
// column of V, all ones, and of o.
template <class Format, int slices, int dim_v, bool rolled>
struct WeightedValues : OnlineSoftmax<slices, dim_v, 1, rolled> {
    using P = Probabilities<Format>;
    using Order = typename P::Order;
    static constexpr bool sums_apart = true;
    static constexpr int sum_column = dim_v / tile::mma_columns;

    // Whether maxima are given out or not, P::headroom says where they are.
    __device__ void start(bool) { OnlineSoftmax<slices, dim_v, 1, rolled>::start(); }

    // Adds the values of a tile, weighed by its scores.
    template <bool masked, bool sums, int tiles, class Tile>
    __device__ __forceinline__ void add(const tile::Accumulator (&s)[slices][tiles], const Tile &v, float factor) {
        ProbabilityFragments<Format, tiles> p[slices];
        take<masked, sums>(p, s, factor);
        accumulate(p, v);
    }

    // Turns scores into P below a new maximum and brings o under it; where `sums`, keeps the sum of exact P, too.
    template <bool masked, bool sums, int tiles>
    __device__ void take(ProbabilityFragments<Format, tiles> (&p)[slices], const tile::Accumulator (&s)[slices][tiles], float factor) {
        float group_max[slices][tiles / 4][2], new_max[slices][2];
        bool grows = false;
#pragma unroll
        for (int slice = 0; slice < slices; ++slice)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                static_for<tiles / 4>(
                    [&](auto h) { group_max[slice][h][half] = P::shared_max(lane_max<4 * h, 4>(s[slice], half)); });
                float tile_max = group_max[slice][0][half];
#pragma unroll
                for (int h = 1; h < tiles / 4; ++h) tile_max = fmaxf(tile_max, group_max[slice][h][half]);
                tile_max = tile::reduce_row(tile_max, [](float a, float b) { return fmaxf(a, b); });
                new_max[slice][half] = fmaxf(this->row_max[slice][half], ceilf(tile_max * factor) - P::headroom);
                grows |= new_max[slice][half] > this->row_max[slice][half];
            }
        if (ptx::vote_sync_any(grows)) this->raise(new_max);
#pragma unroll
        for (int slice = 0; slice < slices; ++slice) {
            P::template encode<masked, sums>(p[slice], s[slice], group_max[slice], this->row_max[slice], this->row_sum[slice], factor);
        }
    }

    // o += P V, and the sums of P.
    template <int tiles, class Tile>
    __device__ void accumulate(const ProbabilityFragments<Format, tiles> (&p)[slices], const Tile &v) {
        if constexpr (rolled) accumulate_rolled(p, v);
        const tile::FragmentB ones = {P::one, P::one};
        static_for<Tile::steps>([&](auto step) {
            static_for<rolled ? 0 : Tile::groups>([&](auto group) {
                const uint32_t scales = v.scales_b(step, group);
                constexpr int group_tiles = 4 * Tile::columns_per_word, tiles_left = dim_v / 8 - group_tiles * group;
                static_for<(tiles_left < group_tiles ? tiles_left : group_tiles) / 2>([&](auto pair) {
                    tile::FragmentB b[2];
                    tile::load_b(b, v.codes, 8 * (group_tiles * group + 2 * pair), 2 * step);
                    static_for<2>([&](auto half) {
                        constexpr int j = 2 * pair + half;
                        static_for<slices>([&](auto slice) {
                            tile::multiply<0, 0, j / 4 * Tile::step_blocks, j % 4>(
                                this->o[slice][group_tiles * group + j], Format{}, p[slice].codes[step], p[slice].scales[step],
                                b[half], scales);
                        });
                    });
                });
            });
            static_for<slices>([&](auto slice) {
                tile::multiply<0, 0, 0, 0>(this->o[slice][sum_column], Format{}, p[slice].codes[step], p[slice].scales[step], ones,
                                           P::unit_scale);
            });
        });
    }

    // o += P V with one copy of the MMAs for all groups of 32 columns; o lies in local memory then.
    template <int tiles, class Tile>
    __device__ void accumulate_rolled(const ProbabilityFragments<Format, tiles> (&p)[slices], const Tile &v) {
#pragma unroll 1
        for (int group = 0; group < dim_v / 32; ++group)
            static_for<Tile::steps>([&](auto step) {
                const int word = group / Tile::columns_per_word, byte = group % Tile::columns_per_word * Tile::step_blocks;
                const uint32_t scales = v.scales_b(step, word) >> (8 * byte);
                static_for<2>([&](auto pair) {
                    tile::FragmentB b[2];
                    tile::load_b(b, v.codes, 32 * group + 16 * pair, 2 * step);
                    static_for<2>([&](auto half) {
                        constexpr int j = 2 * pair + half;
                        static_for<slices>([&](auto slice) {
                            tile::multiply<0, 0, 0, j>(this->o[slice][4 * group + j], Format{}, p[slice].codes[step], p[slice].scales[step],
                                                       b[half], scales);
                        });
                    });
                });
            });
    }

    // The same with V expanded to 16 bits.
    template <int tiles>
    __device__ void accumulate(const ProbabilityFragments<Format, tiles> (&p)[slices], const tile::SharedTile<dim_v, 16 * tiles> &v) {
        using To = tile::Expansion<Format>;
        using Tile = tile::SharedTile<dim_v, 16 * tiles>;
        const tile::FragmentB ones = {To::one, To::one};
        const uint32_t address = tile::address_b(v);
#pragma unroll
        for (int step = 0; step < ProbabilityFragments<Format, tiles>::steps; ++step) {
            tile::FragmentA a[slices][To::fragments];
#pragma unroll
            for (int slice = 0; slice < slices; ++slice)
                tile::expand_a<Format, 0, 0, P::scaled>(a[slice], p[slice].codes[step], p[slice].scales[step]);
#pragma unroll
            for (int i = 0; i < To::fragments; ++i) {
#pragma unroll
                for (int pair = 0; pair < dim_v / 16; ++pair) {
                    tile::FragmentB b[2];
                    tile::load_b<Tile>(b, address, 16 * pair, 2 * (To::fragments * step + i));
#pragma unroll
                    for (int slice = 0; slice < slices; ++slice)
#pragma unroll
                        for (int half = 0; half < 2; ++half)
                            tile::multiply(this->o[slice][2 * pair + half], a[slice][i], b[half], typename To::Element{});
                }
#pragma unroll
                for (int slice = 0; slice < slices; ++slice)
                    tile::multiply(this->o[slice][sum_column], a[slice][i], ones, typename To::Element{});
            }
        }
    }

    __device__ float denominator(int slice, int half) const { return this->o[slice][sum_column][2 * half]; }
};

// In 16 bits P is rounded, and the denominator is the sum of exact P: as op/attention.cuh has it. These MMAs need no stand-in.
template <int slices, int dim_v, bool rolled>
struct WeightedValues<tile::Bf16, slices, dim_v, rolled> : OnlineSoftmaxIn16Bits<tile::Bf16::Element, slices, dim_v> {
    using Order = tile::NaturalKeys;
    static constexpr bool sums_apart = false;

    __device__ void start(bool gives_maxima) {
        OnlineSoftmaxIn16Bits<tile::Bf16::Element, slices, dim_v>::start(headroom_in_16_bits(gives_maxima));
    }

    template <bool masked, bool, int tiles, class Tile>
    __device__ __forceinline__ void add(tile::Accumulator (&s)[slices][tiles], const Tile &v, float factor) {
        this->take(s, factor);
        accumulate_values<tile::Bf16::Element, dim_v, Tile, masked>(*this, s, tile::address_b_transposed(v));
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Q and scores

// Q of a warp's slices: operand A at each step and its scales, two words of a row to a register, or one where loops are `rolled`.
template <class Format, int slices, int dim, bool rolled_>
struct BlockQueries {
    static constexpr bool rolled = rolled_;
    static constexpr int steps = dim / Format::depth, words = ceil_div(steps, Format::steps_per_word);
    static constexpr int register_words = rolled ? 1 : 2;
    tile::FragmentA codes[slices][steps];
    uint32_t scales[slices][ceil_div(words, register_words)];

    // Rows from `warp_row` on; rows and columns that are not there are zeros.
    __device__ void load(const BlockOperands &operands, const Problem &problem, int warp_row) {
        const int thread = ptx::laneid() % 4;
#pragma unroll
        for (int slice = 0; slice < slices; ++slice) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = warp_row + 16 * slice + tile::accumulator_row(2 * half);
                const uint8_t *source = operands.q_codes + problem.at(operands.q_codes_strides, min(row, problem.rows - 1));
#pragma unroll (rolled ? 1 : steps)
                for (int step = 0; step < steps; ++step)
#pragma unroll
                    for (int chunk = 0; chunk < 2; ++chunk) {
                        const int byte = 32 * step + 16 * chunk + 4 * thread;
                        const bool present = row < problem.rows && byte < operands.q_bytes;
                        codes[slice][step][2 * chunk + half] = present ? __ldg(reinterpret_cast<const uint32_t *>(source + byte)) : 0;
                    }
            }
            const int row = min(warp_row + 16 * slice + ptx::laneid() / 4 + 8 * (thread % 2), problem.rows - 1);
            const uint8_t *source = operands.q_scales + problem.at(operands.q_scales_strides, row);
#pragma unroll (rolled ? 1 : words)
            for (int i = 0; i < ceil_div(words, register_words); ++i) {
                uint32_t word = 0;
#pragma unroll
                for (int byte = 0; byte < 4; ++byte) {
                    const int block = 4 * (register_words * i + thread / 2 % register_words) + byte;
                    if (block < operands.q_blocks) word |= uint32_t(__ldg(source + block)) << (8 * byte);
                }
                scales[slice][i] = word;
            }
        }
    }
};

// The scores that the means of queries have, for the rows of a warp.
template <class Order, int slices>
struct MeanScores {
    const float *first = nullptr;   // of all means, in the sequence's first tile
    int rows[slices][2] = {};       // which of all means

    __device__ MeanScores(const BlockOperands &operands, const Problem &problem, int warp_row) {
        if (!operands.mean_scores) return;
        first = operands.mean_scores + int64_t(problem.first_tile(tile::tile_keys)) * tile::tile_keys;
#pragma unroll
        for (int slice = 0; slice < slices; ++slice)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = min(warp_row + 16 * slice + tile::accumulator_row(2 * half), problem.rows - 1);
                const int head = (problem.batch * problem.options.heads_kv + problem.head) * problem.options.group + problem.group_of(row);
                rows[slice][half] = head * operands.query_blocks + problem.first_block() + problem.query_of(row) / smooth_queries;
            }
    }

    // Adds those of the tile `index` of keys.
    template <int tiles>
    __device__ void add(tile::Accumulator (&s)[slices][tiles], const BlockOperands &operands, int index) const {
        const int lane_key = index * tile::tile_keys + Order::key(0, tile::accumulator_column(0));
#pragma unroll
        for (int slice = 0; slice < slices; ++slice)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float *source = first + int64_t(rows[slice][half]) * operands.tiles * tile::tile_keys + lane_key;
#pragma unroll
                for (int j = 0; j < tiles; ++j) {
                    const float2 pair = __ldg(reinterpret_cast<const float2 *>(source + Order::key(j, 0)));
                    s[slice][j][2 * half] += pair.x;
                    s[slice][j][2 * half + 1] += pair.y;
                }
            }
    }
};

// s = Q K^T for all keys of a tile, columns in `Order`.
template <class Order, class Format, int slices, int dim, bool rolled, int tiles, class Tile>
__device__ inline void multiply_block_scores(tile::Accumulator (&s)[slices][tiles],
                                             const BlockQueries<Format, slices, dim, rolled> &q, const Tile &k) {
#pragma unroll
    for (auto &slice : s)
#pragma unroll
        for (auto &accumulator : slice)
#pragma unroll
            for (float &element : accumulator) element = 0.0f;
    const uint32_t lane_address = k.template lane_address<Order>();
    // One copy of the MMAs for all steps; Q lies in local memory then.
#pragma unroll 1
    for (int step = 0; rolled && step < Tile::steps; ++step) {
        const int word = step / Format::steps_per_word, byte = step % Format::steps_per_word * (4 / Format::steps_per_word);
        static_for<tiles / 2>([&](auto pair) {
            const uint32_t k_scales = k.template scales_b<Order>(pair / 2)[word] >> (8 * byte);
            tile::FragmentB b[2];
            Tile::template load_b<Order, pair>(b, lane_address, step);
            static_for<2>([&](auto half) {
                static_for<slices>([&](auto slice) {
                    tile::multiply<0, 0, 0, 2 * (pair % 2) + half>(s[slice][2 * pair + half], Format{}, q.codes[slice][step],
                                                                  q.scales[slice][word] >> (8 * byte), b[half], k_scales);
                });
            });
        });
    }
    static_for<rolled ? 0 : tiles / 4>([&](auto group) {
        const auto &k_scales = k.template scales_b<Order>(group);
        static_for<Tile::steps>([&](auto step) {
            constexpr int word = step / Format::steps_per_word, byte = step % Format::steps_per_word * (4 / Format::steps_per_word);
            static_for<2>([&](auto pair) {
                tile::FragmentB b[2];
                Tile::template load_b<Order, 2 * group + pair>(b, lane_address, step);
                static_for<2>([&](auto half) {
                    static_for<slices>([&](auto slice) {
                        tile::multiply<byte, word % 2, byte, 2 * pair + half>(s[slice][4 * group + 2 * pair + half], Format{},
                                                                             q.codes[slice][step], q.scales[slice][word / 2],
                                                                             b[half], k_scales[word]);
                    });
                });
            });
        });
    });
}

// Q expanded to 16 bits as the lanes multiply it, each its own: registers have no room for it.
template <class Format, int slices, int dim, int threads>
struct ExpandedQueries {
    uint4 fragments[dim / 16][slices][threads];

    __device__ void store(const BlockQueries<Format, slices, dim, false> &q) {
        static_for<slices>([&](auto slice) {
            static_for<BlockQueries<Format, slices, dim, false>::steps>([&](auto step) {
                constexpr int word = step / Format::steps_per_word, byte = step % Format::steps_per_word * (4 / Format::steps_per_word);
                tile::FragmentA a[tile::Expansion<Format>::fragments];
                tile::expand_a<Format, byte, word % 2>(a, q.codes[slice][step], q.scales[slice][word / 2]);
#pragma unroll
                for (int i = 0; i < tile::Expansion<Format>::fragments; ++i)
                    fragments[step * tile::Expansion<Format>::fragments + i][slice][threadIdx.x] = {a[i][0], a[i][1], a[i][2], a[i][3]};
            });
        });
    }

    // Columns 16 step .. + 15 in the order of tile::expand_chunk.
    __device__ void load(tile::FragmentA (&a)[slices], int step) const {
#pragma unroll
        for (int slice = 0; slice < slices; ++slice) {
            const uint4 registers = fragments[step][slice][threadIdx.x];
            a[slice][0] = registers.x, a[slice][1] = registers.y, a[slice][2] = registers.z, a[slice][3] = registers.w;
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The kernel

// How a block divides the work: three or four warps to each quarter of a multiprocessor, so that one multiplies while others are
// in their softmax, and as many rows to a block as that gives, so that K and V come from L2 seldom.
//
// Where there are no block-scaled MMAs, a block expands each tile of codes to 16 bits once for all its warps, which then multiply
// as attention on 16 bits does, two slices to a warp.
template <class ScoreFormat_, class ValueFormat_, int dim_, int dim_v_>
struct BlockTiling {
    using ScoreFormat = ScoreFormat_;
    using ValueFormat = ValueFormat_;
    static constexpr int dim = dim_, dim_v = dim_v_;
    static constexpr int widest = dim > dim_v ? dim : dim_v;
    static constexpr bool expands = !ptx::has_block_scaled_mma && widest <= 128, expands_values = expands && ValueFormat::bits < 16;
    static constexpr int slices = expands ? 2 : 1;
    // Twelve warps where their registers hold o, eight on stand-ins, which need more. NVFP4's P takes longest to make: beside a
    // wide Q twelve warps would wait for the MMAs at once (static model at 192 x 128: 65 % of the peak; 70 % with eight).
    static constexpr bool twelve = ptx::has_block_scaled_mma && widest > 64 && dim_v <= 128 && (dim <= 128 || !std::is_same_v<ValueFormat, tile::Nvfp4>);
    static constexpr int warps = expands ? 4 : twelve ? 12 : 8;
    static constexpr int blocks = expands || (ptx::has_block_scaled_mma && widest <= 64) ? 2 : 1;
    static constexpr int threads = 32 * warps;
    static constexpr int rows = 16 * slices * warps;
    // Wide heads on stand-ins, whose speed is not the point, loop over one copy of their MMAs, which compiles sooner.
    static constexpr bool rolled = !ptx::has_block_scaled_mma && widest > 128;
    static constexpr int spill_bytes = ValueFormat::bits == 16 ? 192 : 128;   // twelve warps are worth a few

    using Keys = tile::KeyTile<ScoreFormat, tile::tile_keys, dim>;
    using Values = tile::ValueTile<ValueFormat, tile::tile_keys, dim_v>;
    struct Stage {
        Keys k;
        Values v;
    };
    struct Nothing {};
    struct ExpandedValues {
        tile::SharedTile<dim_v, 2 * tile::tile_keys> values;
    };
    struct Expanded : std::conditional_t<expands_values, ExpandedValues, Nothing> {
        ExpandedQueries<ScoreFormat, slices, dim, threads> queries;
        tile::SharedTile<tile::tile_keys, 2 * dim> keys;
    };
    static constexpr int budget = 99 * 1024 / blocks - 1024;
    static constexpr int stages = expands ? 2 : budget / int(sizeof(Stage)) < 4 ? budget / int(sizeof(Stage)) : 4;
    static_assert(stages >= 2, "one stage is filled while another is read");

    template <class Output>
    using OutputTile = tile::SharedTile<rows, dim_v * sizeof(Output)>;
    struct Shared : std::conditional_t<expands, Expanded, Nothing> {
        union {
            Stage stage[stages];
            OutputTile<__nv_bfloat16> q;   // when all tiles were read, the output is staged here
        };
        alignas(16) uint64_t full[stages], empty[stages];
    };
    static_assert(sizeof(Shared) <= 99 * 1024 - 1024, "the tiles fit everywhere");
};

// The stages of a block: filled by bulk copies that one lane starts, so that no warp waits for another but through the stages;
// where there is no bulk copy, by all threads between barriers of the block.
template <class Tiling>
struct Pipeline {
    typename Tiling::Shared &shared;
    const typename Tiling::Keys *k;
    const typename Tiling::Values *v;
    int begin, end;   // tiles
    int origin;       // the tile that was, or would have been, the first to go through these stages
    // Tiles on their way; warps may drift apart by the stages that are left. Tiles of e2m1 are done with sooner.
    static constexpr int ahead = ptx::has_bulk_copy && Tiling::stages > 3 && Tiling::ValueFormat::bits == 4 ? 2 : 1;

    // A warp says once that it is done with a stage. On the stand-ins every lane does: compute-sanitizer, which watches those, does
    // not follow a warp's barrier to the lane that speaks for it.
    static constexpr bool lanes_speak = !ptx::has_block_scaled_mma;

    __device__ static uint32_t address(const void *shared) { return static_cast<uint32_t>(__cvta_generic_to_shared(shared)); }
    __device__ auto &stage_of(int index) const { return shared.stage[(index - origin) % Tiling::stages]; }

    // Called by the whole block.
    __device__ void start() {
        if (Tiling::ValueFormat::bits == 16 && begin != origin) {
            if constexpr (ptx::has_bulk_copy) ptx::fence_proxy_async();   // the output was staged where tiles go
            ptx::bar_sync();   // everyone is done with it
        } else if constexpr (ptx::has_bulk_copy) {
            if (threadIdx.x == 0) {
                for (int i = 0; i < Tiling::stages; ++i) {
                    ptx::mbarrier_init(address(&shared.full[i]), 1);
                    ptx::mbarrier_init(address(&shared.empty[i]), lanes_speak ? Tiling::threads : Tiling::warps);
                }
                ptx::fence_mbarrier_init();
            }
            ptx::bar_sync();   // the barriers are there
        }
        for (int index = begin; index < begin + ahead; ++index) fill(index);
    }

    // Fills the stage of a tile when all warps are done with the tile before in it. By all warps.
    __device__ void fill(int index) {
        if constexpr (ptx::has_bulk_copy) {
            if (index >= end || threadIdx.x >= 32 || !ptx::elect_sync()) return;
            const int turn = (index - origin) / Tiling::stages, slot = (index - origin) % Tiling::stages;
            const uint32_t full = address(&shared.full[slot]);
            if (turn > 0) ptx::mbarrier_wait_parity(address(&shared.empty[slot]), (turn - 1) & 1);
            ptx::mbarrier_arrive_expect_tx(full, sizeof(typename Tiling::Stage));
            ptx::cp_async_bulk_shared_global(address(&shared.stage[slot].k), k + index, sizeof(typename Tiling::Keys), full);
            ptx::cp_async_bulk_shared_global(address(&shared.stage[slot].v), v + index, sizeof(typename Tiling::Values), full);
        } else {
            if (index < end) {
                copy(stage_of(index).k, k + index);
                copy(stage_of(index).v, v + index);
            }
            ptx::cp_async_commit_group();
        }
    }

    template <class Tile>
    __device__ void copy(Tile &target, const Tile *source) {
        for (uint32_t at = 16 * threadIdx.x; at < sizeof(Tile); at += 16 * Tiling::threads)
            ptx::cp_async_cg_16(address(&target) + at, reinterpret_cast<const char *>(source) + at, true);
    }

    // The stage of a tile, when it is there; starts filling another. By all warps, for every tile in turn.
    __device__ const typename Tiling::Stage &take(int index) {
        if constexpr (ptx::has_bulk_copy) {
            fill(index + ahead);
            __syncwarp();
            ptx::mbarrier_wait_parity(address(&shared.full[(index - origin) % Tiling::stages]), (index - origin) / Tiling::stages & 1);
        } else {
            ptx::cp_async_wait_group<0>();
            ptx::bar_sync();   // this tile has landed for everyone; everyone is done with the stage that is filled next
            fill(index + ahead);
        }
        return stage_of(index);
    }

    // This warp is done with a tile.
    __device__ void release(int index) {
        if constexpr (ptx::has_bulk_copy) {
            __syncwarp();   // all its lanes are
            if (lanes_speak || ptx::laneid() == 0) ptx::mbarrier_arrive(address(&shared.empty[(index - origin) % Tiling::stages]));
        }
    }
};

// O = softmax(scale Q K^T) V for Tiling::rows rows of one head of K and V (and one split of its keys). Returns whether sums were too small in any of them: then the block calls this `again`.
template <class Tiling, class Softmax>
__device__ __forceinline__ bool attend_rows_of_blocks(typename Tiling::Shared &shared, const BlockOperands &operands,
                                                      const AttentionOptions &options, bool again, float *exact_sum) {
    using Order = typename Softmax::Order;
    const Problem problem(options);
    const int first_row = problem.row_block * Tiling::rows;
    if (first_row >= problem.rows) return false;   // packed sequences have different lengths
    const int end_row = min(first_row + Tiling::rows, problem.rows);
    const int warp_row = first_row + threadIdx.x / 32 * 16 * Tiling::slices;
    const float scale = options.scale * (operands.q_global ? *operands.q_global : 1.0f) * (operands.k_global ? *operands.k_global : 1.0f);

    TileRange<tile::tile_keys> range(problem, first_row, end_row);
    if (operands.mean_scores || again) range.plain_end = range.plain_begin;
    const size_t first_tile = size_t(problem.batch * options.heads_kv + problem.head) * operands.tiles + problem.first_tile(tile::tile_keys);
    const auto *values = reinterpret_cast<const typename Tiling::Values *>(operands.v_tiles) + first_tile;
    Pipeline<Tiling> pipeline{shared, reinterpret_cast<const typename Tiling::Keys *>(operands.k_tiles) + first_tile, values,
                              range.begin, range.end, again ? 2 * range.begin - range.end : range.begin};
    pipeline.start();

    BlockQueries<typename Tiling::ScoreFormat, Tiling::slices, Tiling::dim, Tiling::rolled> q;
    q.load(operands, problem, warp_row);
    if constexpr (Tiling::expands) shared.queries.store(q);
    Softmax softmax;
    softmax.start(options.partial != nullptr);
    if constexpr (Softmax::lowered) softmax.again = again;
    const float factor = score_factor(problem, scale);
    const bool idle = warp_row >= problem.rows;
    const MeanScores<Order, Tiling::slices> mean_scores(operands, problem, warp_row);
    const int warp_end = problem.end_visible(problem.query_of(min(warp_row + 16 * Tiling::slices, problem.rows) - 1));
    auto step = [&](int index, auto masked, auto sums) __attribute__((always_inline)) {   // its arrays are registers
        const auto &stage = pipeline.take(index);
        if constexpr (Tiling::expands) {
            ptx::bar_sync();   // everyone is done with the tile before
            tile::expand_keys<Order, Tiling::threads>(shared.keys, stage.k);
            if constexpr (Tiling::expands_values) {
                tile::expand_values<Tiling::threads>(shared.values, stage.v);
                pipeline.release(index);
            }
            ptx::bar_sync();   // the tile is whole
        }
        // A warp without rows, or whose rows see nothing of this tile, only keeps the stages moving.
        if (!idle && !(masked && index * tile::tile_keys >= warp_end)) {
            tile::Accumulator s[Tiling::slices][tile::tile_keys / tile::mma_columns];
            if constexpr (Tiling::expands)
                multiply_scores<typename tile::Expansion<typename Tiling::ScoreFormat>::Element, Tiling::dim, decltype(shared.keys)>(
                    s, shared.queries, tile::address_b(shared.keys));
            else multiply_block_scores<Order>(s, q, stage.k);
            if (masked && operands.mean_scores) mean_scores.add(s, operands, index);
            if (masked) mask_scores<Order>(s, problem, warp_row, index * tile::tile_keys, scale);
            constexpr bool maybe_masked = !std::is_same_v<decltype(masked), std::false_type>;
            if constexpr (Tiling::expands_values) softmax.template add<maybe_masked, sums>(s, shared.values, factor);
            else softmax.template add<maybe_masked, sums>(s, stage.v, factor);
        }
        if constexpr (!Tiling::expands_values) pipeline.release(index);
    };
    for (int index = range.begin; index < range.end; ++index) {
        // Tiles without masks and sums apart have a loop of their own; stand-ins are so long that one body has to do for all.
        const int stop = range.plain_begin <= index ? range.plain_end : index;
        if constexpr (ptx::has_block_scaled_mma)
            if (!Softmax::sums_apart || (!options.lse && !exact_sum))
                for (; index < stop; ++index) step(index, std::false_type{}, std::false_type{});
        if (index >= range.end) break;
        if constexpr (ptx::has_block_scaled_mma && !Softmax::sums_apart) step(index, std::true_type{}, std::true_type{});
        else step(index, index >= stop, std::true_type{});
    }
    bool lost = false;
    if constexpr (Softmax::lowered)
        if (!again && !idle)
            lost = sums_are_too_small(softmax, softmax.o, problem, warp_row, range.begin * tile::tile_keys, range.end * tile::tile_keys, [&](int key, int j) {
                const uint4 &chunk = values[key / tile::tile_keys].at(key % tile::tile_keys, j);
                return reinterpret_cast<const uint32_t *>(&chunk)[tile::accumulator_column(0) / 2];
            });
    if constexpr (Softmax::lowered) lost = ptx::bar_red_or(lost);   // as the other barrier
    else ptx::bar_sync();   // every warp is done with the stages, over which the output goes
    write_results<Tiling>(softmax, shared, problem, first_row, warp_row, operands.v_global ? *operands.v_global : 1.0f, exact_sum);
    __syncwarp();   // lanes whose rows are not there come together again
    return lost;
}

// The same for the rows of a block.
template <class Tiling>
__device__ __forceinline__ void attention_blocks(typename Tiling::Shared &shared, const BlockOperands &operands, const AttentionOptions &options,
                                                 float *exact_sum) {
    using Softmax = WeightedValues<typename Tiling::ValueFormat, Tiling::slices, Tiling::dim_v, Tiling::rolled>;
    if constexpr (Softmax::lowered) {
#pragma unroll 1
        for (bool again = false; attend_rows_of_blocks<Tiling, Softmax>(shared, operands, options, again, exact_sum); again = true) {}
    } else {
        attend_rows_of_blocks<Tiling, Softmax>(shared, operands, options, false, exact_sum);
    }
}

}  // namespace op

// The parameters of an entry on block formats, and its body.
#define BLOCK_ATTENTION(name, ScoreFormat, ValueFormat, dim_, dim_v_)                                                       \
    KERNEL(name, .threads = {op::BlockTiling<ScoreFormat, ValueFormat, dim_, dim_v_>::threads},                             \
           .shared_bytes = sizeof(op::BlockTiling<ScoreFormat, ValueFormat, dim_, dim_v_>::Shared),                         \
           .tile = {1, op::BlockTiling<ScoreFormat, ValueFormat, dim_, dim_v_>::rows, 1},                                   \
           .min_blocks = op::BlockTiling<ScoreFormat, ValueFormat, dim_, dim_v_>::blocks,                                   \
           .spill_bytes = op::BlockTiling<ScoreFormat, ValueFormat, dim_, dim_v_>::spill_bytes)                             \
    (const uint8_t *q_codes,    /* [batch, heads_kv, group, queries, q_bytes] */                                            \
     const uint8_t *q_scales,   /* [batch, heads_kv, group, queries, q_blocks] */                                           \
     const uint8_t *k_tiles,    /* [batch, heads_kv, tiles, k_bytes]: tile::KeyTile */                                      \
     const uint8_t *v_tiles,    /* [batch, heads_kv, tiles, v_bytes]: tile::ValueTile */                                    \
     const float *q_global, const float *k_global, const float *v_global,                                                   \
     const float *mean_scores,  /* [batch, heads_kv, group, query_blocks, 64 tiles] or null */                              \
     const float *row_shift,    /* [batch, heads_kv, group, queries] or null */                                             \
     ATTENTION_ARRAYS,                                                                                                      \
     float *exact_sum,          /* [splits, batch, heads_kv, group, queries] */                                             \
     ATTENTION_SCALARS, int batch, int heads_kv, int group, int queries, int q_bytes, int q_blocks, int tiles, int k_bytes, \
     int v_bytes, int query_blocks, int keys, int sequences, int cols, int splits, STRIDES_Q(q_codes),                      \
     STRIDES_Q(q_scales), ATTENTION_STRIDES) {                                                                              \
        using Tiling = op::BlockTiling<ScoreFormat, ValueFormat, dim_, dim_v_>;                                             \
        const int dim = dim_, dim_v = cols;                                                                                 \
        op::attention_blocks<Tiling>(shared<typename Tiling::Shared>(),                                                     \
                                     {q_codes, q_scales, k_tiles, v_tiles, q_global, k_global, v_global, mean_scores,       \
                                      q_bytes, q_blocks, tiles, query_blocks, THE_STRIDES_Q(q_codes), THE_STRIDES_Q(q_scales)},      \
                                     ATTENTION_OPTIONS, exact_sum);                                                         \
    }
