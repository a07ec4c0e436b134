// Quotients by the step of an NVFP4 block, in two instructions each, near enough for the codes of e2m1.
#pragma once

#include <cstdint>

#include "scale.cuh"

namespace tile {

// 1 / divisor in two parts, of which `high` is at most the reciprocal, so that `low` has no sign.
//
// quotient() rounds once, from a sum that is within 2^-43 of the quotient. So it is the correctly rounded quotient, or
// a neighbor of it where the quotient is as near to the middle of two floats. The code of a quotient depends on which
// of the two it is only where one of them is a tie of e2m1: 1, 3, 5 or 7 times a power of two. serves() tells that no
// quotient is near to the middle of a tie and its neighbor: in integers of 24 bits, V 2^k of a value and D of a
// divisor, that middle is at D (T 2^m + 1) or D (T 2^m - 1), with m and k at least 22. V 2^k - D (T 2^m + 1) has the
// lowest 22 bits of D or of -D. If they are not zero and not within 64 of it, the quotient is 2^-43 away. If they are
// zero, V 2^k is at least 2^22 away from the middle, or equal to it, which no quotient of two floats is.
struct SplitReciprocal {
    float high = 1.0f, low = 0.0f;

    __device__ SplitReciprocal() {}
    // For divisors from 2^-90 to 2^90.
    __device__ explicit SplitReciprocal(float divisor) {
        // The approximation is within a unit of its last place.
        high = __uint_as_float(__float_as_uint(ptx::rcp_approx_ftz_f32(divisor)) - 1);
        low = fmaf(-divisor, high, 1.0f) * high;
    }

    __device__ float quotient(float value) const { return fmaf(value, high, value * low); }

    // Whether it serves the steps of all scales with 4 significant bits under a global scale.
    __device__ static bool serves(float global_scale) {
        bool all = true;
#pragma unroll 1
        for (int eighths = 8; eighths < 16; ++eighths) {
            const uint32_t bits = __float_as_uint(global_scale * float(eighths)) << 10;
            all = all && (bits == 0 || bits + (64u << 10) > 128u << 10);
        }
        return all;
    }
};

}   // namespace tile
