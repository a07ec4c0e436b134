// Online softmax in registers: the running maximum, sum and output of the rows of one warp.
#pragma once

#include "../kernel.cuh"
#include "../ptx/math.cuh"
#include "../ptx/warp.cuh"
#include "../tile/fragment.cuh"

namespace op {

// The running softmax of `slices` times 16 rows of a warp over dim_v columns: o is the output before division, [h] belongs
// to rows g + 8 h of a slice.
//
// The maximum is kept in units of log2 and rounded up to an integer, so that probabilities are the exact ones times a power
// of two: rescaling is exact, and neither the order of tiles nor how keys are split changes a probability's mantissa.
// `more` column tiles behind those of the output go along with it.
template <int slices, int dim_v, int more = 0>
struct OnlineSoftmax {
    tile::Accumulator o[slices][dim_v / tile::mma_columns + more];
    float row_max[slices][2];   // the same in the four lanes of a row
    float row_sum[slices][2];   // of this lane's columns only, until finish()

    __device__ void start() {
#pragma unroll
        for (int slice = 0; slice < slices; ++slice) {
#pragma unroll
            for (auto &accumulator : o[slice])
#pragma unroll
                for (float &element : accumulator) element = 0.0f;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                row_max[slice][half] = -INFINITY;
                row_sum[slice][half] = 0.0f;
            }
        }
    }

    // 2^-n for the whole number `steps` = -n; 0 from -127 on. Exact, which ex2.approx does not promise.
    __device__ static float power_of_two(float steps) {
        return __uint_as_float(__float_as_uint(fmaxf(steps, -127.0f) + (0x1.8p23f + 127.0f)) << 23);
    }

    // Turns scores into probabilities below a new maximum and brings o and row_sum under it. `factor` takes a score to units
    // of log2; `masked` scores are there already and may be -inf.
    template <bool masked, int tiles>
    __device__ void take(tile::Accumulator (&s)[slices][tiles], float factor) {
        float new_max[slices][2];
        bool grows = false;
#pragma unroll
        for (int slice = 0; slice < slices; ++slice)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float tile_max = fmaxf(s[slice][0][2 * half], s[slice][0][2 * half + 1]);
#pragma unroll
                for (int j = 1; j < tiles; ++j) tile_max = fmaxf(tile_max, fmaxf(s[slice][j][2 * half], s[slice][j][2 * half + 1]));
                tile_max = tile::reduce_row(tile_max, [](float a, float b) { return fmaxf(a, b); });
                new_max[slice][half] = fmaxf(row_max[slice][half], ceilf(masked ? tile_max : tile_max * factor));
                grows |= new_max[slice][half] > row_max[slice][half];
            }
        if (ptx::vote_sync_any(grows)) raise(new_max);
#pragma unroll
        for (int slice = 0; slice < slices; ++slice) {
            float base[2];
#pragma unroll
            for (int half = 0; half < 2; ++half)   // no key yet: -inf less -inf would be NaN
                base[half] = masked && row_max[slice][half] == -INFINITY ? 0.0f : row_max[slice][half];
#pragma unroll
            for (auto &scores : s[slice])
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    scores[i] = ptx::ex2_approx_ftz_f32(masked ? scores[i] - base[i / 2] : fmaf(scores[i], factor, -base[i / 2]));
                    row_sum[slice][i / 2] += scores[i];
                }
        }
    }

    // Brings o and row_sum under new maxima; rows whose maximum stays are multiplied by 1.
    __device__ void raise(const float (&new_max)[slices][2]) {
#pragma unroll
        for (int slice = 0; slice < slices; ++slice)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float steps = row_max[slice][half] == new_max[slice][half] ? 0.0f : row_max[slice][half] - new_max[slice][half];
                const float rescale = power_of_two(steps);
                row_max[slice][half] = new_max[slice][half];
                row_sum[slice][half] *= rescale;
#pragma unroll
                for (auto &accumulator : o[slice]) {
                    accumulator[2 * half] *= rescale;
                    accumulator[2 * half + 1] *= rescale;
                }
            }
    }

    // What o is divided by.
    __device__ float denominator(int slice, int half) const { return row_sum[slice][half]; }

    // Adds up row_sum over the lanes of each row.
    __device__ void finish() {
#pragma unroll
        for (auto &sums : row_sum)
#pragma unroll
            for (float &sum : sums) sum = tile::reduce_row(sum, [](float a, float b) { return a + b; });
    }
};

}  // namespace op
