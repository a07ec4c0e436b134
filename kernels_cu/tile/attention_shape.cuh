// How blocks of attention divide the work on the target of this compilation. The choice is made here alone: op/ uses
// the same names for all targets.
#pragma once

#include <type_traits>

#include "../ptx/target.cuh"
#include "block_tiles.cuh"
#include "format.cuh"

namespace tile {

// Attention on 16 bits: `warps` warps with `slices` times 16 rows each, tiles of `keys` keys, and `blocks` blocks to a
// multiprocessor, so that one is in its softmax while another multiplies.
//
// With two slices, a warp reads K and V from shared memory half as often and issues fewer instructions per MMA, which
// Ampere and Hopper need. There Q stays in registers if they suffice. On GeForce Blackwell an MMA takes five times as
// long, and warps of one slice leave room for two blocks in 100 KiB. `one_slice` serves few rows or few blocks on
// Ampere and Hopper: such warps are bound by memory latency and have registers to spare. Both give the same bits.
template <int dim, bool one_slice>
struct AttentionShape {
    static constexpr bool has_halves = !ptx::has_block_scaled_mma;
    static constexpr bool small = dim <= 128, wide = small && (!ptx::has_block_scaled_mma || dim <= 64);
    static constexpr int shared_bytes = ptx::shared_bytes_per_block;
    static constexpr bool roomy = shared_bytes > 128 * 1024;
    static constexpr int slices = wide && !one_slice ? 2 : 1;
    static constexpr int warps = small ? 4 : 8;
    // Short sequences of narrow heads are bound by the latencies of a block's beginning and end. With three blocks,
    // some registers are spilled outside of the loop over tiles.
    static constexpr int blocks = has_halves && dim <= 32 && !one_slice ? 3 : small ? 2 : 1;
    static constexpr int keys = wide || (!small && roomy) ? 64 : dim > 192 ? 16 : 32;
    static constexpr bool keeps_q = (wide && (dim <= 64 || one_slice)) || (!small && roomy && dim <= 192);
    // Where registers suffice: whole blocks of other widths would spill in the loop over tiles.
    static constexpr bool ends_quickly = has_halves && (one_slice || dim == 128);
    // On Hopper, copies of the next tile have no branch, so that they are issued between MMAs.
    static constexpr bool weaves = has_halves && !one_slice && ptx::has_bulk_copy && (dim == 64 || dim == 128);
};

// Attention on block formats: three or four warps to each quarter of a multiprocessor, so that one multiplies while
// others are in their softmax. The more rows a block has, the less K and V it reads from L2 for each of them. Two
// blocks on a multiprocessor start and end at different times, so that one multiplies while the other loads Q or
// writes.
//
// `half` serves few blocks: four warps, of which a multiprocessor has room for two blocks with all the registers that
// they can use. Both give the same bits.
//
// Without block-scaled MMAs, a block `expands` each tile of codes to 16 bits, once for all its warps, which multiply as
// attention on 16 bits does, with two slices each.
template <class ScoreFormat, class ValueFormat, int dim, int dim_v, bool half = false>
struct BlockAttentionShape {
    static constexpr int widest = dim > dim_v ? dim : dim_v;
    static constexpr bool has_halves = ptx::has_block_scaled_mma && dim == dim_v && (dim == 64 || dim == 128);
    static constexpr bool expands = !ptx::has_block_scaled_mma && widest <= 128;
    static constexpr int slices = expands ? 2 : 1;
    // Sixteen warps of 128 registers. At 128 columns o and scores leave 28 of them: Q in 4 bits fits, and what tiles
    // need rarely is spilled (at most six reloads in a plain tile).
    static constexpr bool crowded = ptx::has_block_scaled_mma && !half && widest == 128 && dim == dim_v &&
                                    ScoreFormat::bits == 4 && ValueFormat::bits < 16;
    static constexpr bool sixteen = ptx::has_block_scaled_mma && (widest <= 64 || crowded);
    // Twelve warps if their registers hold o; eight with stand-ins, which need more registers. NVFP4's P takes longest
    // to compute: with a wide Q, twelve warps would wait for the MMAs at the same time (static model at 192 x 128: 65 %
    // of the peak; 70 % with eight).
    static constexpr bool twelve =
        ptx::has_block_scaled_mma && !sixteen && dim_v <= 128 && (dim <= 128 || !std::is_same_v<ValueFormat, Nvfp4>);
    static constexpr int warps = expands || half ? 4 : twelve ? 12 : 8;
    static constexpr int blocks = expands || half || sixteen ? 2 : 1;
    // Wide heads with stand-ins loop over one copy of their MMAs: it compiles faster, and their speed matters less.
    static constexpr bool rolled = !ptx::has_block_scaled_mma && widest > 128;
    // Stand-ins are long: one loop body serves all tiles.
    static constexpr bool has_plain_loop = ptx::has_block_scaled_mma;
};

// `has_halves` for the preprocessor, of a unit on block formats: only then the unit has entries of half blocks.
#define UNIT_TAKES_HALF_BLOCKS                                                                                         \
    (HAS_BLOCK_SCALED_MMA && VARIANT_dim == VARIANT_dim_v && (VARIANT_dim == 64 || VARIANT_dim == 128))

// Whether lanes that share a scale exchange their largest scores before a warp knows which rows grow. Native code does
// so after. The stand-ins stay as they were measured.
constexpr bool exchanges_maxima_first = !ptx::has_block_scaled_mma;

}   // namespace tile
