// Online softmax in registers: the running maximum, sum and output of the rows of one warp.
#pragma once

#include "../kernel.cuh"
#include "../ptx/math.cuh"
#include "../ptx/warp.cuh"
#include "../tile/fragment.cuh"

namespace op {

// The maximum of a row that has seen no score: the lowest finite number, which leaves every score as it is or above it,
// and from which a hidden score of -inf differs by -inf, never by NaN.
constexpr float no_maximum = -0x1.fffffep127f;

// 2^-n for the whole number `steps` = -n, up to 2^127; 0 from -127 on. Exact, which ex2.approx does not promise.
__device__ inline float power_of_two(float steps) {
    return __uint_as_float(__float_as_uint(fmaxf(steps, -127.0f) + (0x1.8p23f + 127.0f)) << 23);
}

// Exponents x = score factor - base of weights 2^x, where `base` is a whole number: rounded to multiples of 2^-17 for x
// from -48 to 16; weights below 2^-46 do not count. Under another base weights are the same but for a power of two, bit
// for bit, so that neither a row's maximum nor what it was before decides to which side a weight next to a tie is
// rounded.
//
// For that exponents are lowered by 80: floats from -128 to -64 are such multiples, so that one fma rounds, and
// ex2.approx, which on Hopper has other mantissas above 0 than below it, is asked below 0 alone. Beside a base of 2^28
// or more, which scores or masks may have, they are lowered by less or not at all: then the fma rounds as it would by
// itself.
struct Exponents {
    static constexpr float most = 80.0f;
    float lowered_base, steps;   // base + steps; by how much exponents are lowered

    __device__ explicit Exponents(float base) : lowered_base(__fadd_rd(base, most)), steps(lowered_base - base) {}
    __device__ float lowered(float score, float factor) const { return fmaf(score, factor, -lowered_base); }
    __device__ float operator()(float score, float factor) const { return lowered(score, factor) + steps; }
    __device__ float weight(float score, float factor) const {
        return ptx::ex2_approx_ftz_f32(lowered(score, factor)) * power_of_two(steps);
    }
};

// The running softmax of `slices` times 16 rows of a warp over dim_v columns: o is the output before division, [h]
// belongs to rows g + 8 h of a slice.
//
// The maximum is kept in units of log2 and rounded up to an integer, so that probabilities are the exact ones times a
// power of two: rescaling is exact, and neither the order of tiles nor how keys are split changes a probability's
// mantissa (see Exponents). For the same reason a row may keep its maximum until a score exceeds it by more than
// `headroom`: its sum and output are then larger by a power of two, and less is rescaled. `more` column tiles behind
// those of the output go along.
//
// Where loops over the columns of o are `rolled`, o lies in local memory.
//
// Probabilities may stay `lowered` as Exponents are, by 2^-80, which saves bringing them up. Then row_sum is lowered
// until finish(), o always, and row_max is 80 higher until finish().
//
// Sums of lowered probabilities times V overflow for no V, but below 2^-126 they lose bits. Such sums are computed
// `again` with probabilities that are 2^120 times as large where they meet V, in masked tiles alone, so that plain ones
// pay nothing for it.
//
// NaN among scores gives weights of NaN, and so a row_sum and an o of NaN. It does not enter row_max.
template <int slices, int dim_v, int more = 0, bool rolled_ = false, bool lowered_ = false>
struct OnlineSoftmax {
    static constexpr bool rolled = rolled_, lowered = lowered_;
    static constexpr float raised = 0x1p120f;       // how much larger probabilities are when sums are computed again
    static constexpr float too_small = 0x1p-116f;   // from here on sums are computed again,
    static constexpr float taken_again = 4.0f;      // and of those computed again, smaller ones are taken: |o| < 2^-118
    static constexpr int columns = dim_v / tile::mma_columns + more;
    tile::Accumulator o[slices][columns];
    float row_max[slices][2];   // the same in the four lanes of a row
    float row_sum[slices][2];   // of this lane's columns only, until finish()
    float o_scale[slices][2];   // what takes o to what it is named, since finish()
    float headroom;             // of scores above row_max
    bool again = false;         // where `lowered`: whether sums are computed again

    __device__ void start(float headroom = 0.0f) {
        this->headroom = lowered ? headroom - Exponents::most : headroom;
#pragma unroll
        for (int slice = 0; slice < slices; ++slice) {
#pragma unroll(rolled ? 1 : columns)
            for (auto &accumulator : o[slice])
#pragma unroll
                for (float &element : accumulator) element = 0.0f;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                row_max[slice][half] = no_maximum;
                row_sum[slice][half] = 0.0f;
            }
        }
    }

    // What brings values under a maximum under another, at least as large.
    __device__ static float rescale(float max, float new_max) { return power_of_two(max - new_max); }

    // The row_max of a largest score, in units of log2.
    __device__ static float whole(float max) { return lowered ? Exponents(ceilf(max)).lowered_base : ceilf(max); }

    // Turns scores into probabilities below a new maximum and brings o and row_sum under it. `factor`, above 0, takes a
    // score to units of log2; scores may be -inf.
    template <int tiles>
    __device__ __forceinline__ void take(tile::Accumulator (&s)[slices][tiles], float factor) {
        float tile_max[slices][2];   // of this lane's columns: that is enough where no row's maximum grows
        bool grows = false;
        tile::for_rows<slices>([&](int slice, int half) {
            float &max = tile_max[slice][half];
            max = fmaxf(s[slice][0][2 * half], s[slice][0][2 * half + 1]);
#pragma unroll
            for (int j = 1; j < tiles; ++j) max = fmaxf(max, fmaxf(s[slice][j][2 * half], s[slice][j][2 * half + 1]));
            max *= factor;
            grows |= max > row_max[slice][half] + headroom;
        });
        if (ptx::vote_sync_any(grows)) {
            tile::for_rows<slices>([&](int slice, int half) {   // a row decides by itself, whatever its warp does
                float &max = tile_max[slice][half];
                max = tile::reduce_row(max, [](float a, float b) { return fmaxf(a, b); });
                max = max > row_max[slice][half] + headroom ? whole(max) : row_max[slice][half];
            });
            raise(tile_max);
        }
#pragma unroll
        for (int slice = 0; slice < slices; ++slice) {
            const float base[2] = {row_max[slice][0], row_max[slice][1]};
#pragma unroll
            for (auto &scores : s[slice])
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    scores[i] = lowered ? ptx::ex2_approx_ftz_f32(fmaf(scores[i], factor, -base[i / 2]))
                                        : Exponents(base[i / 2]).weight(scores[i], factor);
                    row_sum[slice][i / 2] += scores[i];
                }
        }
    }

    // Brings o and row_sum under new maxima; rows whose maximum stays are multiplied by 1.
    __device__ __forceinline__ void raise(const float (&new_max)[slices][2]) {
        tile::for_rows<slices>([&](int slice, int half) {
            const float factor = rescale(row_max[slice][half], new_max[slice][half]);
            row_max[slice][half] = new_max[slice][half];
            row_sum[slice][half] *= factor;
#pragma unroll(rolled ? 1 : columns)
            for (auto &accumulator : o[slice]) {
                accumulator[2 * half] *= factor;
                accumulator[2 * half + 1] *= factor;
            }
        });
    }

    // What o is divided by, of all lanes since finish(); 0 where a row has no weights.
    __device__ float denominator(int slice, int half) const { return row_sum[slice][half]; }

    // What probabilities are multiplied by before they meet V, a pair of bf16: 2^120 or 1.
    __device__ uint32_t value_factors() const { return again ? 0x7b807b80u : 0x3f803f80u; }

    // Computed again: makes sums NaN that are not small, which the first time had right.
    __device__ __forceinline__ void keep_small_sums() {
#pragma unroll
        for (int slice = 0; slice < slices; ++slice)
#pragma unroll
            for (int j = 0; j < columns; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (!(fabsf(o[slice][j][i]) < taken_again)) o[slice][j][i] = __uint_as_float(0x7fffffffu);
    }

    // Adds up row_sum over the lanes of each row; it and row_max are as they are named from here on, and o is once it
    // is multiplied by o_scale.
    __device__ __forceinline__ void finish() {
        tile::for_rows<slices>([&](int slice, int half) {
            float &sum = row_sum[slice][half], &max = row_max[slice][half];
            sum = tile::reduce_row(sum, [](float a, float b) { return a + b; });
            o_scale[slice][half] = 1.0f;
            if constexpr (lowered) {
                const float named = __fsub_ru(max, Exponents::most);   // undoes Exponents
                o_scale[slice][half] = rescale(max, named);
                sum *= o_scale[slice][half];
                max = named;
                if (again) o_scale[slice][half] *= 1.0f / raised;
            }
        });
    }
};

}   // namespace op
