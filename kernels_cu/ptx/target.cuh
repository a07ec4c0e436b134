// Which instructions the target of this compilation has. The only file that reads the architecture macros.
#pragma once

namespace ptx {

#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__)
constexpr int architecture_family = __CUDA_ARCH_FAMILY_SPECIFIC__ / 100;
#else
constexpr int architecture_family = 0;   // plain targets (sm_80, sm_90) and the host pass
#endif

#if defined(__CUDA_ARCH__)
constexpr int architecture = __CUDA_ARCH__ / 10;
#else
constexpr int architecture = 0;
#endif

// sm_120a, sm_121a and their family: mma.sync with .block_scale, conversions to and from e2m1, e2m3, e3m2 and ue8m0.
// The suffix matters: plain sm_120 rejects all of them (PTX ISA 9.0, sections 9.7.14 and 9.7.9.21).
constexpr bool has_block_scaled_mma = architecture_family == 12;
constexpr bool has_narrow_conversions = architecture_family == 12;

// The same as a macro: only the preprocessor can leave out an entry.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ / 100 == 12
#define HAS_BLOCK_SCALED_MMA 1
#else
#define HAS_BLOCK_SCALED_MMA 0
#endif

// ldmatrix and stmatrix of bytes, and of 4-bit elements. (Plain sm_120 rejects these, too.)
constexpr bool has_byte_matrices = architecture_family == 12;

// stmatrix, elect.sync.
constexpr bool has_stmatrix = architecture >= 90;
constexpr bool has_elect = architecture >= 90;

// cp.async.bulk, and what its mbarriers need: arrive.expect_tx and try_wait. Where it is false, copy by cp.async.
constexpr bool has_bulk_copy = architecture >= 90;

// Threads that a multiprocessor holds: 2048 from sm_80 to sm_100, fewer on the consumer chips between and after.
constexpr int resident_threads = architecture >= 120 ? 1536 : 2048;

// Sums, minima and maxima of pairs of 16-bit integers.
constexpr bool has_packed_integers = architecture >= 90;

// Conversions to and from e4m3 and e5m2.
constexpr bool has_fp8_conversions = architecture >= 89;

// Shared memory that one block can have. What is compiled for sm_80 also runs on sm_86 and sm_89, which have less than
// it.
constexpr int shared_bytes_per_block = (architecture == 90 ? 227 : 99) * 1024;

}   // namespace ptx
