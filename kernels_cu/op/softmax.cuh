// Online softmax in registers: the running maximum, sum and output of the rows of one warp.
#pragma once

#include "../kernel.cuh"
#include "../ptx/math.cuh"
#include "../ptx/warp.cuh"
#include "../tile/fragment.cuh"

namespace op {

// The maximum of a row without scores so far: the lowest finite number. No finite score is below it, and a hidden score
// of -inf minus it is -inf, not NaN.
constexpr float no_maximum = -0x1.fffffep127f;

// 2^steps for an integer `steps` up to 127; 0 for -127 and below. Exact, unlike ex2.approx.
__device__ inline float power_of_two(float steps) {
    return __uint_as_float(__float_as_uint(fmaxf(steps, -127.0f) + (0x1.8p23f + 127.0f)) << 23);
}

// Exponents x = score factor - base of weights 2^x, where `base` is an integer. x from -48 to 16 is rounded to a
// multiple of 2^-17; weights below 2^-46 are negligible. Another base changes weights by a power of two alone, bit for
// bit. So the rounding of a weight next to a tie depends neither on the row's maximum nor on its earlier maxima.
//
// To this end, exponents are lowered by 80. Floats from -128 to -64 are multiples of 2^-17, so the fma itself rounds.
// ex2.approx gets negative arguments only: on Hopper its mantissas above 0 differ from those below. With a base of 2^28
// or more, which scores or masks may cause, exponents are lowered by less or not at all, and the fma rounds as usual.
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
// The maximum is in units of log2 and rounded up to an integer, so that probabilities are the exact ones times a power
// of two: rescaling is exact, and neither the order of tiles nor the split of keys changes a probability's mantissa
// (see Exponents). So a row may keep its maximum until a score exceeds it by more than `headroom`, which saves
// rescaling: its sum and output are then larger by a power of two. o has `more` column tiles behind those of the
// output, which are rescaled with it.
//
// If loops over the columns of o are `rolled`, o is in local memory.
//
// If `lowered`, probabilities keep the factor 2^-80 of lowered exponents, which saves a multiplication each. o has this
// factor, too, and row_sum has it until finish(); until then row_max is 80 higher.
//
// Sums of lowered probabilities times V overflow for no V, but below 2^-126 they lose bits. Such sums are computed
// `again`, with probabilities times 2^120 as operands of the product with V. That pass treats all tiles as masked ones,
// so the code of plain tiles has no such factor.
//
// NaN among scores gives weights of NaN, and so a row_sum and an o of NaN. It does not enter row_max.
template <int slices, int dim_v, int more = 0, bool rolled_ = false, bool lowered_ = false>
struct OnlineSoftmax {
    static constexpr bool rolled = rolled_, lowered = lowered_;
    static constexpr float raised = 0x1p120f;       // the factor of probabilities when sums are computed again
    static constexpr float too_small = 0x1p-116f;   // smaller sums are computed again
    static constexpr float taken_again = 4.0f;      // smaller results of that are taken: |o| < 2^-118
    static constexpr int columns = dim_v / tile::mma_columns + more;
    tile::Accumulator o[slices][columns];
    float row_max[slices][2];   // the same in the four lanes of a row
    float row_sum[slices][2];   // of this lane's columns only, until finish()
    float o_scale[slices][2];   // since finish(): o o_scale is the output before division
    float headroom;             // of scores above row_max
    bool again = false;         // if `lowered`: whether sums are computed again

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

    // The factor from values relative to `max` to values relative to new_max >= max.
    __device__ static float rescale(float max, float new_max) { return power_of_two(max - new_max); }

    // row_max of a row whose largest score is `max`, in units of log2.
    __device__ static float whole(float max) { return lowered ? Exponents(ceilf(max)).lowered_base : ceilf(max); }

    // Replaces scores by probabilities relative to the new maximum, and rescales o and row_sum to it. `factor`, above
    // 0, converts scores to units of log2; scores may be -inf.
    template <int tiles>
    __device__ __forceinline__ void take(tile::Accumulator (&s)[slices][tiles], float factor) {
        float tile_max[slices][2];   // of this lane's columns: enough if no row's maximum grows
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
            tile::for_rows<slices>([&](int slice, int half) {   // depends on the row alone, not on its warp
                float &max = tile_max[slice][half];
                max = tile::reduce_row(max, [](float a, float b) { return fmaxf(a, b); });
                max = max > row_max[slice][half] + headroom ? whole(max) : row_max[slice][half];
            });
            raise(tile_max);
        }
        // Probabilities, and their sums.
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

    // Rescales o and row_sum to new maxima; rows whose maximum stays are multiplied by 1.
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

    // The divisor of o; until finish(), this lane's part of it. 0 if a row has no weights.
    __device__ float denominator(int slice, int half) const { return row_sum[slice][half]; }

    // The factors of probabilities as operands of the product with V, a pair of bf16: 2^120 or 1.
    __device__ uint32_t value_factors() const { return again ? 0x7b807b80u : 0x3f803f80u; }

    // After sums were computed again: replaces those that are not small by NaN, since the first pass has written them.
    __device__ __forceinline__ void keep_small_sums() {
#pragma unroll
        for (int slice = 0; slice < slices; ++slice)
#pragma unroll
            for (int j = 0; j < columns; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (!(fabsf(o[slice][j][i]) < taken_again)) o[slice][j][i] = __uint_as_float(0x7fffffffu);
    }

    // Adds row_sum over the lanes of each row. From here on row_sum and row_max are not lowered, nor is o o_scale.
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
