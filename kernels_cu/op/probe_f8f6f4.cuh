// The probe of kind::f8f6f4, whose accumulators are chosen when it is launched.
#pragma once

#include "probe.cuh"

namespace op {

// Elements of kind::f8f6f4 for a pair of formats, with accumulators of f16 or f32.
__device__ inline void probe_f8f6f4(int *meets, int format_a, int format_b, bool in_f16, int number) {
    if (in_f16) probe_f8f6f4<true>(meets, format_a, format_b, number);
    else probe_f8f6f4<false>(meets, format_a, format_b, number);
}

}   // namespace op
