// Predicated loads of one number that stay behind griddepcontrol_wait(), as those of access_early.cuh.
#pragma once

namespace ptx {

// The number if `present`, else `otherwise`.
__device__ inline float ld_global_f32_if(bool present, const float *global, float otherwise) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0;\n@p ld.global.f32 %0, [%1]; }"
                 : "+f"(otherwise)
                 : "l"(__cvta_generic_to_global(global)), "r"(int(present))
                 : "memory");
    return otherwise;
}

}   // namespace ptx
