// What all kernels need: names and launch facts of entries, shared memory, and compile-time loops.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

// How one entry launches: nine int32, in this order. The module contains them as the constant ENTRY_launch, so that a
// loader reads them from the code that it runs.
struct LaunchFacts {
    int threads[3];     // block dimensions x, y, z; 0 counts as 1
    int shared_bytes;   // dynamic shared memory per block
    int tile[3];        // elements of grid axis x, y, z that one block covers; 0 counts as 1
    int min_blocks;     // blocks that must fit on one multiprocessor
    int spill_bytes;    // bytes that native code may spill; the build fails above it
};

constexpr int at_least_one(int count) { return count > 0 ? count : 1; }

constexpr LaunchFacts complete(LaunchFacts facts) {
    for (int axis = 0; axis < 3; ++axis) {
        facts.threads[axis] = at_least_one(facts.threads[axis]);
        facts.tile[axis] = at_least_one(facts.tile[axis]);
    }
    facts.min_blocks = at_least_one(facts.min_blocks);
    return facts;
}

// Declares one entry:
//   KERNEL(name, .threads = {256}, .shared_bytes = sizeof(Shared), .tile = {128})(parameters) { body }
#define KERNEL(name, ...) KERNEL_EXPANDED(name, __VA_ARGS__)
#define KERNEL_EXPANDED(name, ...)                                                                                     \
    static constexpr LaunchFacts name##_facts = complete({__VA_ARGS__});                                               \
    extern "C" __constant__ const LaunchFacts name##_launch = name##_facts;                                            \
    extern "C" __global__ void __launch_bounds__(                                                                      \
        name##_facts.threads[0] * name##_facts.threads[1] * name##_facts.threads[2], name##_facts.min_blocks) name

// VARIANTS(dim, 32, 64) at the top of a .cu: build.py compiles the file once per value, with VARIANT_dim defined to it.
#define VARIANTS(axis, ...)

// The name of an entry: the name of the unit, which build.py passes as UNIT, and a suffix, which may be empty:
// ENTRY(_f32), ENTRY().
#define ENTRY(suffix) PASTE(UNIT, suffix)
#define PASTE(a, b) PASTE_EXPANDED(a, b)
#define PASTE_EXPANDED(a, b) a##b

// WITHOUT_PARENTHESES (a, b) is a, b: how a macro takes a list as one argument.
#define WITHOUT_PARENTHESES(...) __VA_ARGS__

// X for lists of X(type, name): parameters, members of a struct, or values of its members.
#define AS_PARAMETER(type, name) type name,
#define AS_MEMBER(type, name) type name;
#define AS_ARGUMENT(type, name) name,

// The block's dynamic shared memory, seen as one struct. 1024-byte aligned: no swizzle needs more.
template <class Shared>
__device__ inline Shared &shared() {
    extern __shared__ __align__(1024) unsigned char shared_raw[];
    return *reinterpret_cast<Shared *>(shared_raw);
}

template <class Body, int... indices>
__device__ inline void static_for_each(Body &&body, std::integer_sequence<int, indices...>) {
    (body(std::integral_constant<int, indices>{}), ...);
}

// Calls body(i) for i = 0 .. count-1 with each i a compile-time constant, so that it may be a template argument or an
// immediate operand of an instruction.
template <int count, class Body>
__device__ inline void static_for(Body &&body) {
    static_for_each(body, std::make_integer_sequence<int, count>{});
}

template <class Int>
__host__ __device__ constexpr Int ceil_div(Int value, Int divisor) {
    return (value + divisor - 1) / divisor;
}
