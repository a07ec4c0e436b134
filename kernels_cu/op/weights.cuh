// Weights of attention on operands in block formats: how scores become P, in codes and scales or in 16 bits, and P is
// multiplied by V.
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

// P of 16 rows and `tiles` column tiles of S.
template <class Format, int tiles>
struct ProbabilityFragments {
    static constexpr int steps = 8 * tiles / Format::depth;
    tile::FragmentA codes[steps];
    uint32_t scales[steps];
};

// The largest score of the column tiles first .. first + count - 1 in one row of this lane. It is NaN if a score is, so
// that the scale becomes NaN, since e2m1 has none.
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

// How P becomes codes and scales. `headroom`: row_max is so many steps of 2 below the rounded-up maximum, so that the
// scale range of P is used from its top and a tail far below the maximum survives.
//
// shared_max() of a lane's largest score of 32 keys is that of the lanes of the quad that share a scale, max_of_row()
// of the largest of those that of the row. encode() takes the scores of 16 rows; group_max[h][half] is shared_max() of
// 32 keys (h) in a row; row_max is that of the row already. Codes and scales are the same under any row_max, but for a
// power of two: what is rounded to them comes from Exponents, or from exponents without a row_max in them. Where
// `sums`, P before it is rounded is added to row_sum, for the logarithm of the sum alone.
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
    __device__ static float max_of_row(float max) {
        return tile::reduce_row(max, [](float a, float b) { return fmaxf(a, b); });
    }

    template <bool masked, bool sums, int tiles>
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
    __device__ static float max_of_row(float max) { return max; }

    template <bool masked, bool sums, int tiles>
    __device__ static void encode(ProbabilityFragments<tile::Mxfp4, tiles> &p, const tile::Accumulator (&s)[tiles],
                                  const float (&group_max)[tiles / 4][2], const float (&row_max)[2],
                                  float (&row_sum)[2], float factor) {
        constexpr float log2_6 = 2.584962500721156f,
                        to_scale = 0x1.8p23f + 127.0f;   // leaves a whole number + 127 in the low bits
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
                    exponentials<8 * step + 4 * h>(values, s, half, [&](float score) {
                        return ptx::ex2_approx_ftz_f32(fmaf(score, factor, -base));
                    });
                    p.codes[step][2 * h + half] = ptx::cvt_rn_satfinite_e2m1x8_f32(values);
                    scale[h] = __float_as_uint(rounded);
                    if constexpr (sums)
                        row_sum[half] = fmaf(__uint_as_float(scale[h] << 23), sum_of(values), row_sum[half]);
                });
                words[half] = __byte_perm(scale[0], scale[1], 0x7740);
            }
            p.scales[step] = tile::scale_half() ? words[1] : words[0];
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
    __device__ static float shared_max(float lane_max) {
        return ptx::max_nan_f32(lane_max, ptx::shfl_sync_bfly_f32(lane_max, 1));
    }
    __device__ static float max_of_row(float max) { return fmaxf(max, ptx::shfl_sync_bfly_f32(max, 2)); }

    template <bool masked, bool sums, int tiles>
    __device__ static void encode(ProbabilityFragments<tile::Nvfp4, tiles> &p, const tile::Accumulator (&s)[tiles],
                                  const float (&group_max)[tiles / 4][2], const float (&row_max)[2],
                                  float (&row_sum)[2], float factor) {
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
                    exponentials<8 * step + 4 * h>(values, s, half, [&](float score) {
                        return ptx::ex2_approx_ftz_f32(fmaf(score, factor, -base));
                    });
                    p.codes[step][2 * h + half] = ptx::cvt_rn_satfinite_e2m1x8_f32(values);
                    scales[2 * half + h] = Exponents(row_max[half]).weight(base, 1.0f);
                    if constexpr (sums) row_sum[half] = fmaf(scales[2 * half + h], sum_of(values), row_sum[half]);
                }
            });
            // A lane has every second block of both rows, its neighbour at distance 2 the others.
            const uint32_t own = ptx::cvt_rn_satfinite_e4m3x4_f32(scales), other = ptx::shfl_sync_bfly_b32(own, 2);
            p.scales[step] = __byte_perm(own, other, tile::scale_half() ? 0x7362 : 0x5140);
        });
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Softmax and O = P V

// The running softmax by the format of V: the order of the keys, start(), add() of a tile, denominator(), and what
// OnlineSoftmax has. sums_apart: sums of exact P are another work than the denominator's, and are kept where `sums`
// asks for them.
//
// In block formats P is quantized: the denominator is the sum of P as it is multiplied, codes times scales, which is
// one more column of V, all ones, and of o.
template <class Format, int slices, int dim_v, bool rolled>
struct WeightedValues : OnlineSoftmax<slices, dim_v, 1, rolled> {
    using P = Probabilities<Format>;
    using Order = typename P::Order;
    static constexpr bool sums_apart = true;
    static constexpr int sum_column = dim_v / tile::mma_columns;

    // Whether maxima are given out or not, P::headroom says where they are.
    __device__ void start(bool) { OnlineSoftmax<slices, dim_v, 1, rolled>::start(); }

    // Adds the values of a tile, weighed by its scores: by add_weighted(softmax, p, v) of its kind.
    template <bool masked, bool sums, int tiles, class Tile>
    __device__ __forceinline__ void add(const tile::Accumulator (&s)[slices][tiles], const Tile &v, float factor) {
        ProbabilityFragments<Format, tiles> p[slices];
        take<masked, sums>(p, s, factor);
        add_weighted(*this, p, v);
    }

    // Turns scores into P below a new maximum and brings o under it; where `sums`, keeps the sum of exact P, too.
    template <bool masked, bool sums, int tiles>
    __device__ void take(ProbabilityFragments<Format, tiles> (&p)[slices], const tile::Accumulator (&s)[slices][tiles],
                         float factor) {
        float group_max[slices][tiles / 4][2], tile_max[slices][2];
        if (find_maxima(group_max, tile_max, s, factor)) raise_to(tile_max, factor);
        encode<masked, sums>(p, s, group_max, factor);
    }

    // take() for a plain tile. before() adds to o what belongs under the old maxima. If no row grows, its MMAs run
    // beside the exponentials of P.
    template <int tiles, class Before>
    __device__ __forceinline__ void take_after(ProbabilityFragments<Format, tiles> (&p)[slices],
                                               const tile::Accumulator (&s)[slices][tiles], float factor,
                                               Before &&before) {
        float group_max[slices][tiles / 4][2], tile_max[slices][2];
        if (find_maxima(group_max, tile_max, s, factor)) {
            before();
            raise_to(tile_max, factor);
            encode<false, false>(p, s, group_max, factor);
        } else {
            encode<false, false>(p, s, group_max, factor);
            before();
        }
    }

    // Computes the largest scores of a tile, for each scale and for this lane's part of each row. Returns whether some
    // row of the warp grows.
    //
    // A lane compares its part of a row. raise_to() then computes the maximum of the whole row, rounded up. The sum in
    // the comparison is rounded up, so that it misses no row that grows. A comparison before shared_max() hides its
    // shuffles. Beside a NaN it finds rows whose maximum stays, which raise_to() leaves as they are.
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
            grows |= __fmaf_ru(tile_max[slice][half], factor, -P::headroom) > this->row_max[slice][half];
        });
        if constexpr (!tile::exchanges_maxima_first)
            tile::for_rows<slices>([&](int slice, int half) {
                static_for<tiles / 4>(
                    [&](auto h) { group_max[slice][h][half] = P::shared_max(group_max[slice][h][half]); });
                of_groups(slice, half);
            });
        return ptx::vote_sync_any(grows);
    }

    // A row decides by itself, whatever its warp does.
    __device__ void raise_to(float (&tile_max)[slices][2], float factor) {
        tile::for_rows<slices>([&](int slice, int half) {
            float &max = tile_max[slice][half];
            max = fmaxf(this->row_max[slice][half], ceilf(P::max_of_row(max) * factor) - P::headroom);
        });
        this->raise(tile_max);
    }

    template <bool masked, bool sums, int tiles>
    __device__ void encode(ProbabilityFragments<Format, tiles> (&p)[slices],
                           const tile::Accumulator (&s)[slices][tiles], const float (&group_max)[slices][tiles / 4][2],
                           float factor) {
#pragma unroll
        for (int slice = 0; slice < slices; ++slice) {
            P::template encode<masked, sums>(p[slice], s[slice], group_max[slice], this->row_max[slice],
                                             this->row_sum[slice], factor);
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
                                this->o[slice][group_tiles * group + j], Format{}, p[slice].codes[step],
                                p[slice].scales[step], b[half], scales);
                        });
                    });
                });
            });
            static_for<slices>([&](auto slice) {
                tile::multiply<0, 0, 0, 0>(this->o[slice][sum_column], Format{}, p[slice].codes[step],
                                           p[slice].scales[step], ones, P::unit_scale);
            });
        });
    }

    // o += P V with one copy of the MMAs for all groups of 32 columns; o lies in local memory then.
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
template <class Format, int slices, int dim_v, bool rolled, int tiles, int keys>
__device__ inline void add_weighted(WeightedValues<Format, slices, dim_v, rolled> &softmax,
                                    const ProbabilityFragments<Format, tiles> (&p)[slices],
                                    const tile::ValueTile<Format, keys, dim_v> &v) {
    softmax.accumulate(p, v);
}

// In 16 bits P is rounded, and the denominator is the sum of exact P: as op/attention.cuh has it. These MMAs need no
// stand-in.
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

}   // namespace op
