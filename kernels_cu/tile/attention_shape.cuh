// How blocks of attention divide the work on the target of this compilation. Chosen here, once: op/ has the same names
// for all.
#pragma once

#include <type_traits>

#include "../ptx/target.cuh"
#include "block_tiles.cuh"
#include "format.cuh"

namespace tile {

// Attention on 16 bits: `warps` warps with `slices` times 16 rows each, tiles of `keys` keys, `blocks` blocks to a
// multiprocessor, so that one computes scores while another multiplies.
//
// Two slices to a warp read K and V from shared memory half as often and issue fewer instructions to an MMA, which
// Ampere and Hopper need; there Q stays in registers where they have room. On GeForce Blackwell an MMA takes five times
// as long: there warps of one slice leave room for two blocks in 100 KiB. `one_slice` is for few rows or few blocks on
// the former: its warps, which have registers to spare, wait for memory most. Both give the same bits.
template <int dim, bool one_slice>
struct AttentionShape {
    static constexpr bool has_halves = !ptx::has_block_scaled_mma;
    static constexpr bool small = dim <= 128, wide = small && (!ptx::has_block_scaled_mma || dim <= 64);
    static constexpr int shared_bytes = ptx::shared_bytes_per_block;
    static constexpr bool roomy = shared_bytes > 128 * 1024;
    static constexpr int slices = wide && !one_slice ? 2 : 1;
    static constexpr int warps = small ? 4 : 8;
    static constexpr int blocks = small ? 2 : 1;
    static constexpr int keys = wide || (!small && roomy) ? 64 : dim > 192 ? 16 : 32;
    static constexpr bool keeps_q = (wide && (dim <= 64 || one_slice)) || (!small && roomy && dim <= 192);
};

// Attention on block formats: three or four warps to each quarter of a multiprocessor, so that one multiplies while
// others are in their softmax, and as many rows to a block as that gives, so that K and V come from L2 seldom.
//
// Where there are no block-scaled MMAs, a block `expands` each tile of codes to 16 bits once for all its warps, which
// then multiply as attention on 16 bits does, two slices to a warp.
template <class ValueFormat, int dim, int dim_v>
struct BlockAttentionShape {
    static constexpr int widest = dim > dim_v ? dim : dim_v;
    static constexpr bool expands = !ptx::has_block_scaled_mma && widest <= 128;
    static constexpr int slices = expands ? 2 : 1;
    // Twelve warps where their registers hold o, eight on stand-ins, which need more. NVFP4's P takes longest to make:
    // beside a wide Q twelve warps would wait for the MMAs at once (static model at 192 x 128: 65 % of the peak; 70 %
    // with eight).
    static constexpr bool twelve =
        ptx::has_block_scaled_mma && widest > 64 && dim_v <= 128 && (dim <= 128 || !std::is_same_v<ValueFormat, Nvfp4>);
    static constexpr int warps = expands ? 4 : twelve ? 12 : 8;
    static constexpr int blocks = expands || (ptx::has_block_scaled_mma && widest <= 64) ? 2 : 1;
    // Wide heads on stand-ins, whose speed is not the point, loop over one copy of their MMAs, which compiles sooner.
    static constexpr bool rolled = !ptx::has_block_scaled_mma && widest > 128;
    // Stand-ins are so long that one body has to do for all tiles.
    static constexpr bool has_plain_loop = ptx::has_block_scaled_mma;
};

}   // namespace tile
