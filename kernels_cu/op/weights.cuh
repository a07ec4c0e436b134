// Weights of attention on operands in block formats: scores become P, in codes and scales or in 16 bits, and O += P V.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../tile/attention_shape.cuh"
#include "../tile/block_tiles.cuh"
#include "../tile/fragment.cuh"
#include "attention.cuh"
#include "softmax.cuh"

namespace op {

// ---------------------------------------------------------------------------------------------------------------------
// Probabilities as operand A

// P of 16 rows and `tiles` column tiles of S, [16, 8 tiles], as A of `steps` MMAs.
template <class Format, int tiles>
struct ProbabilityFragments {
    static constexpr int steps = 8 * tiles / Format::depth;
    tile::FragmentA codes[steps];
    uint32_t scales[steps];
};

// The largest score of the column tiles first .. first + count - 1 in one row of this lane. NaN if any of them is NaN:
// e2m1 has no NaN, so the scale must become NaN.
template <int first, int count, int tiles>
__device__ inline float lane_max(const tile::Accumulator (&s)[tiles], int half) {
    float result = ptx::max_nan_f32(s[first][2 * half], s[first][2 * half + 1]);
#pragma unroll
    for (int j = first + 1; j < first + count; ++j)
        result = ptx::max_nan_f32(result, ptx::max_nan_f32(s[j][2 * half], s[j][2 * half + 1]));
    return result;
}

// p = weight(score) of this lane's eight scores of a row in the column tiles first .. first + 3.
template <int first, int tiles, class Weight>
__device__ inline void exponentials(float (&p)[8], const tile::Accumulator (&s)[tiles], int half, Weight &&weight) {
#pragma unroll
    for (int i = 0; i < 8; ++i) p[i] = weight(s[first + i / 2][2 * half + i % 2]);
}

// The sum of p; values that are `apart` places apart are added first.
template <int apart = 1>
__device__ inline float sum_of(const float (&p)[8]) {
    const auto pair = [&](int i) {
        const int first = i % apart + i / apart * 2 * apart;
        return p[first] + p[first + apart];
    };
    return (pair(0) + pair(1)) + (pair(2) + pair(3));
}

// How P becomes codes and scales. A row_max that is raised to new scores is `depth` below their rounded-up maximum, in
// units of log2. Scores may then exceed row_max by `headroom` before it is raised again, since each time costs a warp
// its rescaling: P up to 2^headroom has codes and scales. A greater depth leaves less room for growing scores, but
// weights far below the maximum keep more bits.
//
// shared_max() reduces a lane's largest score of 32 keys over the lanes of the quad that share a scale. max_of_row()
// reduces the largest of these over the row. encode() converts the scores of 16 rows to P: group_max[h][half] is
// shared_max() of the h-th 32 keys in row g + 8 half, and row_max includes the scores of this tile. If `sums`, encode()
// also adds P before rounding to row_sum; only lse and exact_sum need that sum.
//
// Another row_max changes codes and scales by a power of two alone: the values that are rounded come from Exponents, or
// from exponents that do not contain row_max.
template <class Format>
struct Probabilities;

// P in e4m3 with scales of 1, up to the largest e4m3, 448.
template <>
struct Probabilities<tile::Mxfp8> {
    using Order = tile::KeysByFours;
    static constexpr float headroom = 8.0f, depth = 7.0f;
    static constexpr bool scaled = false;
    static constexpr uint32_t one = 0x38383838u, unit_scale = 0x7f7f7f7fu;

    __device__ static float shared_max(float lane_max) { return lane_max; }
    __device__ static float max_of_row(float max) {
        return tile::reduce_row(max, [](float a, float b) { return fmaxf(a, b); });
    }

    template <bool masked, bool sums, bool, int tiles>
    __device__ static void encode(ProbabilityFragments<tile::Mxfp8, tiles> &p, const tile::Accumulator (&s)[tiles],
                                  const float (&)[tiles / 4][2], const float (&row_max)[2], float (&row_sum)[2],
                                  float factor) {
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

// P in e2m1 with one ue8m0 scale for 32 keys: the smallest power of two under which no value saturates. Scales have
// room for any P; the limit is that of sums in f32, as in 16 bits.
template <>
struct Probabilities<tile::Mxfp4> {
    using Order = tile::KeysByEights;
    static constexpr float headroom = 8.0f, depth = 0.0f;
    static constexpr bool scaled = true;
    static constexpr uint32_t one = 0x22222222u, unit_scale = 0x7f7f7f7fu;

    __device__ static float shared_max(float lane_max) {
        return tile::reduce_row(lane_max, [](float a, float b) { return ptx::max_nan_f32(a, b); });
    }
    __device__ static float max_of_row(float max) { return max; }

    template <bool masked, bool sums, bool, int tiles>
    __device__ static void encode(ProbabilityFragments<tile::Mxfp4, tiles> &p, const tile::Accumulator (&s)[tiles],
                                  const float (&group_max)[tiles / 4][2], const float (&row_max)[2],
                                  float (&row_sum)[2], float factor) {
        constexpr float log2_6 = 2.584962500721156f,
                        to_scale = 0x1.8p23f + 127.0f;   // x + to_scale: x rounded, + 127, in the low bits
        static_for<tiles / 8>([&](auto step) {
            uint32_t words[2];   // of scales, of rows g and g + 8
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Exponents below(row_max[half]);
                uint32_t scale[2];
                static_for<2>([&](auto h) {
                    // The scale is 2^rounded, where rounded = log2(largest P of the block / 6), rounded up, and at
                    // least -40.
                    const float exponent = below(group_max[2 * step + h][half], factor) - log2_6;
                    const float rounded = __fadd_ru(ptx::max_nan_f32(exponent, -40.0f), to_scale);
                    const float base = row_max[half] + (rounded - to_scale);
                    float values[8];
                    exponentials<8 * step + 4 * h>(values, s, half, [&](float score) {
                        return ptx::ex2_approx_ftz_f32(fmaf(score, factor, -base));
                    });
                    p.codes[step][2 * h + half] = ptx::cvt_rn_satfinite_e2m1x8_f32(values);
                    scale[h] = __float_as_uint(rounded);
                    if constexpr (sums)   // in the order that is fastest in the static model
                        row_sum[half] = fmaf(__uint_as_float(scale[h] << 23), sum_of<4>(values), row_sum[half]);
                });
                words[half] = __byte_perm(scale[0], scale[1], 0x7740);
            }
            p.scales[step] = tile::scale_half() ? words[1] : words[0];
        });
    }
};

// P in e2m1 with one ue4m3 scale for 16 keys, up to the largest ue4m3, 448: P up to 6 x 448.
template <>
struct Probabilities<tile::Nvfp4> {
    using Order = tile::KeysByEights;
    static constexpr float headroom = 11.0f, depth = 9.0f;
    static constexpr bool scaled = true;
    static constexpr uint32_t one = 0x22222222u, unit_scale = 0x38383838u;

    // Two lanes of a quad hold the 16 keys of a block.
    __device__ static float shared_max(float lane_max) {
        return ptx::max_nan_f32(lane_max, ptx::shfl_sync_bfly_f32(lane_max, 1));
    }
    __device__ static float max_of_row(float max) { return fmaxf(max, ptx::shfl_sync_bfly_f32(max, 2)); }

    template <bool masked, bool sums, bool scales_first, int tiles>
    __device__ static void encode(ProbabilityFragments<tile::Nvfp4, tiles> &p, const tile::Accumulator (&s)[tiles],
                                  const float (&group_max)[tiles / 4][2], const float (&row_max)[2],
                                  float (&row_sum)[2], float factor) {
        constexpr float log2_6 = 2.584962500721156f;
        static_for<tiles / 8>([&](auto step) {
            float bases[2][2], scales[4];   // [half][h] and [2 half + h]
            // This lane carries the scales of one row; exact sums need those of both. It has every second block of the
            // row, the lane at distance 2 has the others.
            const auto carry_scales = [&] {
                const bool lower = tile::scale_half();
                const Exponents of_row(lower ? row_max[1] : row_max[0]);
                float carried[4] = {};
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    carried[h] = sums ? (lower ? scales[2 + h] : scales[h])
                                      : of_row.weight(lower ? bases[1][h] : bases[0][h], 1.0f);
                const uint32_t own = sums ? ptx::cvt_rn_satfinite_e4m3x4_f32(carried)
                                          : ptx::cvt_rn_satfinite_e4m3x2_f32(carried[1], carried[0]);
                p.scales[step] = __byte_perm(own, ptx::shfl_sync_bfly_b32(own, 2), 0x5140);
            };
            const auto find_base = [&](int h, int half) {
                float &base = bases[half][h];
                base = fmaf(group_max[2 * step + h][half], factor, -log2_6);
                if (masked) base = ptx::max_nan_f32(base, row_max[half] - 40.0f);   // a block without visible keys
            };
            if constexpr (scales_first) {
                static_for<2>([&](auto h) {
                    find_base(h, 0);
                    find_base(h, 1);
                });
                if constexpr (!sums) carry_scales();   // the exponentials hide its latency
            }
            static_for<2>([&](auto h) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if constexpr (!scales_first) find_base(h, half);
                    const float base = bases[half][h];
                    float values[8];
                    exponentials<8 * step + 4 * h>(values, s, half, [&](float score) {
                        return ptx::ex2_approx_ftz_f32(fmaf(score, factor, -base));
                    });
                    p.codes[step][2 * h + half] = ptx::cvt_rn_satfinite_e2m1x8_f32(values);
                    if constexpr (sums || !scales_first)
                        scales[2 * half + h] = Exponents(row_max[half]).weight(base, 1.0f);
                    if constexpr (sums) row_sum[half] = fmaf(scales[2 * half + h], sum_of(values), row_sum[half]);
                }
            });
            if constexpr (!scales_first) {   // both rows' scales, between their exponentials
                const uint32_t own = ptx::cvt_rn_satfinite_e4m3x4_f32(scales), other = ptx::shfl_sync_bfly_b32(own, 2);
                p.scales[step] = __byte_perm(own, other, tile::scale_half() ? 0x7362 : 0x5140);
            } else if constexpr (sums) {
                carry_scales();
            }
        });
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Softmax and O = P V

// The running softmax for one format of V: OnlineSoftmax with the order of the keys, start(), add() of a tile and
// denominator(). sums_apart: the sum of exact P is not the denominator; it costs extra work and is computed only if
// `sums`.
//
// In block formats P is quantized, and the denominator is the sum of codes times scales. The MMAs compute it in column
// tile `sum_column` of o, with columns of ones as B.
template <class Format, int slices, int dim_v, bool rolled, bool in_half>
struct WeightedValues : OnlineSoftmax<slices, dim_v, 1, rolled> {
    using P = Probabilities<Format>;
    using Order = typename P::Order;
    static constexpr bool sums_apart = true;
    static constexpr int sum_column = dim_v / tile::mma_columns;
    // Whether scales of P in NVFP4 come before its exponentials, each lane making those of one row. At 192 columns the
    // scales of both rows between the exponentials are 6 % faster in the static model.
    static constexpr bool scales_first = dim_v != 192;
    // Two forms of one comparison. Half blocks of 128 columns are 3 to 12 % faster with an addition to row_max in the
    // static model, whole ones 4 to 6 % slower, narrower ones as fast.
    static constexpr bool adds_headroom = in_half && dim_v == 128;

    float depth;   // of a raised row_max below the rounded-up maximum

    // If maxima are an output, row_max is P::headroom below the rounded-up maximum of each row.
    __device__ void start(bool gives_maxima) {
        OnlineSoftmax<slices, dim_v, 1, rolled>::start();
        depth = gives_maxima ? P::headroom : P::depth;
    }

    // o += P V of a tile, by the overload of add_weighted(softmax, p, v) for its type.
    template <bool masked, bool sums, int tiles, class Tile>
    __device__ __forceinline__ void add(const tile::Accumulator (&s)[slices][tiles], const Tile &v, float factor) {
        ProbabilityFragments<Format, tiles> p[slices];
        take<masked, sums>(p, s, factor);
        add_weighted(*this, p, v);
    }

    // Computes P relative to the new maximum and rescales o to it. If `sums`, adds exact P to row_sum.
    template <bool masked, bool sums, int tiles>
    __device__ void take(ProbabilityFragments<Format, tiles> (&p)[slices], const tile::Accumulator (&s)[slices][tiles],
                         float factor) {
        float group_max[slices][tiles / 4][2], tile_max[slices][2];
        if (find_maxima(group_max, tile_max, s, factor)) raise_to(tile_max, factor);
        encode<masked, sums>(p, s, group_max, factor);
    }

    // take() for a plain tile while products of an earlier tile are still missing in o. before() adds them, relative to
    // the old maxima; after() adds products of P. If no maximum grows, the MMAs of before() overlap the exponentials of
    // P. If `sums`, adds exact P to row_sum.
    template <bool sums, int tiles, class Before, class After>
    __device__ __forceinline__ void take_after(ProbabilityFragments<Format, tiles> (&p)[slices],
                                               const tile::Accumulator (&s)[slices][tiles], float factor,
                                               Before &&before, After &&after) {
        float group_max[slices][tiles / 4][2], tile_max[slices][2];
        if (find_maxima(group_max, tile_max, s, factor)) {
            before();
            raise_to(tile_max, factor);
            encode<false, sums>(p, s, group_max, factor);
            after();
        } else {
            encode<false, sums>(p, s, group_max, factor);
            before();
            after();
        }
    }

    // Computes the largest scores of a tile, for each scale and for this lane's part of each row. Returns whether the
    // maximum of any row of the warp grows.
    //
    // A lane compares its own part of a row; raise_to() computes the maximum of the whole row, rounded up. The
    // comparison rounds up, so that it misses no row whose maximum grows. A comparison before shared_max() hides the
    // latency of its shuffles. With a NaN among the scores, it may also report rows whose maximum stays; raise_to()
    // does not change these.
    template <int tiles>
    __device__ bool find_maxima(float (&group_max)[slices][tiles / 4][2], float (&tile_max)[slices][2],
                                const tile::Accumulator (&s)[slices][tiles], float factor) {
        bool grows = false;
        const auto of_groups = [&](int slice, int half) {
            float &max = tile_max[slice][half];
            max = group_max[slice][0][half];
#pragma unroll
            for (int h = 1; h < tiles / 4; ++h) max = fmaxf(max, group_max[slice][h][half]);
        };
        tile::for_rows<slices>([&](int slice, int half) {
            static_for<tiles / 4>([&](auto h) {
                const float max = lane_max<4 * h, 4>(s[slice], half);
                group_max[slice][h][half] = tile::exchanges_maxima_first ? P::shared_max(max) : max;
            });
            of_groups(slice, half);
            const float max = tile_max[slice][half], row_max = this->row_max[slice][half];
            grows |= adds_headroom ? __fmul_ru(max, factor) > row_max + P::headroom
                                   : __fmaf_ru(max, factor, -P::headroom) > row_max;
        });
        if constexpr (!tile::exchanges_maxima_first)
            tile::for_rows<slices>([&](int slice, int half) {
                static_for<tiles / 4>(
                    [&](auto h) { group_max[slice][h][half] = P::shared_max(group_max[slice][h][half]); });
                of_groups(slice, half);
            });
        return ptx::vote_sync_any(grows);
    }

    // Raises the maxima of the rows that need it. The maximum of a row depends on that row alone, not on the rest of
    // the warp.
    __device__ void raise_to(float (&tile_max)[slices][2], float factor) {
        tile::for_rows<slices>([&](int slice, int half) {
            float &max = tile_max[slice][half];
            max = P::max_of_row(max) * factor;
            max = max > this->row_max[slice][half] + P::headroom ? ceilf(max) - depth : this->row_max[slice][half];
        });
        this->raise(tile_max);
    }

    template <bool masked, bool sums, int tiles>
    __device__ void encode(ProbabilityFragments<Format, tiles> (&p)[slices],
                           const tile::Accumulator (&s)[slices][tiles], const float (&group_max)[slices][tiles / 4][2],
                           float factor) {
#pragma unroll
        for (int slice = 0; slice < slices; ++slice) {
            P::template encode<masked, sums, scales_first>(p[slice], s[slice], group_max[slice], this->row_max[slice],
                                                           this->row_sum[slice], factor);
        }
    }

    // o += P V, and the sums of P in column tile `sum_column`.
    template <int tiles, class Tile>
    __device__ void accumulate(const ProbabilityFragments<Format, tiles> (&p)[slices], const Tile &v) {
        if constexpr (rolled) accumulate_rolled(p, v);
        accumulate_pairs<0, rolled ? 0 : pairs_of<Tile>>(p, v);
    }

    // The pairs of column tiles of all steps of P V, each a load of V and its MMAs.
    template <class Tile>
    static constexpr int pairs_of = Tile::steps * dim_v / (2 * tile::mma_columns);

    // The part of o += P V of the pairs begin .. end - 1; the last pair of a step brings the sums of P of the step.
    template <int begin, int end, int tiles, class Tile>
    __device__ void accumulate_pairs(const ProbabilityFragments<Format, tiles> (&p)[slices], const Tile &v) {
        constexpr int step_pairs = pairs_of<Tile> / Tile::steps;
        const auto is_wanted = [](int pair) { return begin <= pair && pair < end; };
        const tile::FragmentB ones = {P::one, P::one};
        static_for<Tile::steps>([&](auto step) {
            static_for<rolled ? 0 : Tile::groups>([&](auto group) {
                const uint32_t scales = v.scales_b(step, group);
                constexpr int group_tiles = 4 * Tile::columns_per_word, tiles_left = dim_v / 8 - group_tiles * group;
                static_for<(tiles_left < group_tiles ? tiles_left : group_tiles) / 2>([&](auto pair) {
                    if constexpr (is_wanted(step_pairs * step + group_tiles / 2 * group + pair)) {
                        tile::FragmentB b[2];
                        tile::load_b(b, v.codes, 8 * (group_tiles * group + 2 * pair), 2 * step);
                        static_for<2>([&](auto half) {
                            constexpr int j = 2 * pair + half;
                            static_for<slices>([&](auto slice) {
                                tile::multiply<0, 0, j / 4 * Tile::step_blocks, j % 4>(
                                    this->o[slice][group_tiles * group + j], Format{}, p[slice].codes[step],
                                    p[slice].scales[step], b[half], scales);
                            });
                        });
                    }
                });
            });
            if constexpr (rolled || is_wanted(step_pairs * (step + 1) - 1))
                static_for<slices>([&](auto slice) {
                    tile::multiply<0, 0, 0, 0>(this->o[slice][sum_column], Format{}, p[slice].codes[step],
                                               p[slice].scales[step], ones, P::unit_scale);
                });
        });
    }

    // o += P V in a loop with one copy of the MMAs for all groups of 32 columns. Run-time indices put o in local
    // memory.
    template <int tiles, class Tile>
    __device__ void accumulate_rolled(const ProbabilityFragments<Format, tiles> (&p)[slices], const Tile &v) {
#pragma unroll 1
        for (int group = 0; group < dim_v / 32; ++group)
            static_for<Tile::steps>([&](auto step) {
                const int word = group / Tile::columns_per_word,
                          byte = group % Tile::columns_per_word * Tile::step_blocks;
                const uint32_t scales = v.scales_b(step, word) >> (8 * byte);
                static_for<2>([&](auto pair) {
                    tile::FragmentB b[2];
                    tile::load_b(b, v.codes, 32 * group + 16 * pair, 2 * step);
                    static_for<2>([&](auto half) {
                        constexpr int j = 2 * pair + half;
                        static_for<slices>([&](auto slice) {
                            tile::multiply<0, 0, 0, j>(this->o[slice][4 * group + j], Format{}, p[slice].codes[step],
                                                       p[slice].scales[step], b[half], scales);
                        });
                    });
                });
            });
    }

    __device__ float denominator(int slice, int half) const { return this->o[slice][sum_column][2 * half]; }
};

// o += P V of a tile of V in codes and scales.
template <class Softmax, class Format, int slices, int dim_v, int tiles, int keys>
__device__ inline void add_weighted(Softmax &softmax, const ProbabilityFragments<Format, tiles> (&p)[slices],
                                    const tile::ValueTile<Format, keys, dim_v> &v) {
    softmax.accumulate(p, v);
}

// V in bf16: P is rounded to bf16, and the denominator is the sum of exact P, as in attention.cuh. Every target has
// these MMAs.
template <int slices, int dim_v, bool rolled, bool in_half>
struct WeightedValues<tile::Bf16, slices, dim_v, rolled, in_half>
    : OnlineSoftmaxIn16Bits<tile::Bf16::Element, slices, dim_v> {
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

}   // namespace op
