// Structs with bytes between their fields, copied as a whole: nvcc reads the gaps, and says which bytes matter.
struct Tagged {
    char tag;
    int value;
};

struct __align__(16) Wide {
    float x;
    double y;
};

extern "C" __global__ void fill(Tagged *tagged, Wide *wide, int whole) {
    const int i = threadIdx.x;
    tagged[i].tag = i;
    wide[i].x = i;
    if (whole) tagged[i].value = 3 * i;
    if (whole) wide[i].y = 2 * i;
}

extern "C" __global__ void copy_tagged(Tagged *to, const Tagged *from) { to[threadIdx.x] = from[threadIdx.x]; }

extern "C" __global__ void copy_wide(Wide *to, const Wide *from) { to[threadIdx.x] = from[threadIdx.x]; }

__device__ __noinline__ Tagged next(Tagged tagged) {
    tagged.value += 1;
    return tagged;
}

extern "C" __global__ void copy_through_calls(Tagged *to, const Tagged *from) {
    Tagged tagged;
    tagged.tag = from[threadIdx.x].tag;
    tagged.value = from[threadIdx.x].value;
    to[threadIdx.x] = next(tagged);
}
