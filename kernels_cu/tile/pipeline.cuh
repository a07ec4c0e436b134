// The stages of a block's loop over tiles of K and V: how they are filled and released.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../ptx/barrier.cuh"
#include "../ptx/bulk.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/target.cuh"
#include "../ptx/warp.cuh"
#include "block_tiles.cuh"
#include "fragment.cuh"

namespace tile {

// The tiles of K and V in shared memory; a Place is that of one tile. If K has as many stages as V, both of a stage are
// neighbors.
template <class Keys, class Values, int key_stages, int stages>
struct Stages {
    Keys keys[key_stages];
    Values values[stages];
    struct Place {
        Keys *keys;
        Values *values;
        __device__ Keys &k() const { return *keys; }
        __device__ Values &v() const { return *values; }
    };
    __device__ Place at(unsigned tile) { return {&keys[tile % key_stages], &values[tile % stages]}; }
};

template <class Keys, class Values, int stages>
struct Stages<Keys, Values, stages, stages> {
    struct Stage {
        Keys k;
        Values v;
    } stage[stages];
    struct Place {
        Stage *stage;
        __device__ Keys &k() const { return stage->k; }
        __device__ Values &v() const { return stage->v; }
    };
    template <class Index>
    __device__ Place at(Index tile) {
        return {&stage[tile % stages]};
    }
};

// The stages of a block. One lane fills them by bulk copies, so that warps wait for each other through the stages
// alone. Without bulk copies, all threads fill them between barriers of the block.
template <class Tiling>
struct Pipeline {
    typename Tiling::Shared &shared;
    const typename Tiling::Keys *k;
    const typename Tiling::Values *v;
    int begin, end;   // tiles
    int origin;       // the tile number at which the phases of the barriers begin, also if it is not processed
    // Scores that pass through the stages with each tile: `mean_vectors` times tile_keys floats, at `means` for tile 0,
    // then mean_step floats further for each tile.
    const float *means = nullptr;
    int mean_step = 0;
    int mean_vectors = 0;
    int fill_end = Tiling::warp() == 0 ? end : begin;   // this warp fills the stages of the tiles before it
    // Tiles in flight. Warps may drift apart by the remaining stages. Tiles of e2m1 and narrow tiles of 8 bits take
    // less time, so two of them are in flight.
    static constexpr bool has_short_tiles =
        Tiling::ValueFormat::bits == 4 || (ptx::has_block_scaled_mma && Tiling::ValueFormat::bits == 8 &&
                                           Tiling::ScoreFormat::bits == 8 && Tiling::widest <= 64);
    static constexpr int ahead = ptx::has_bulk_copy && Tiling::stages > 3 && has_short_tiles ? 2 : 1;

    // One lane of a warp releases a stage. With stand-ins every lane does: compute-sanitizer, which runs them, does not
    // see that a warp's barrier orders its lanes before the releasing one.
    static constexpr bool lanes_speak = !ptx::has_block_scaled_mma;
    static constexpr int releases = lanes_speak ? Tiling::threads : Tiling::warps;   // of a stage

    __device__ static uint32_t address(const void *shared) {
        return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    }
    // Unsigned indices make a stage a mask, and fill_end in a register replaces a read of the thread's number in each
    // tile. Two stages gain nothing. The portable code stays as it was measured.
    static constexpr bool lean = ptx::has_block_scaled_mma && Tiling::stages > 2;

    // The number of tiles that passed through the stages before a tile.
    __device__ auto place(int index) const { return std::conditional_t<lean, unsigned, int>(index - origin); }
    __device__ auto stage_of(int index) const { return shared.tiles.at(place(index)); }

    // Whether this warp fills the stage of a tile.
    __device__ bool fills(int index) const {
        if constexpr (lean) return index < fill_end;
        else return index < end && threadIdx.x < 32;
    }

    // Called by the whole block.
    __device__ void start() {
        if (Tiling::runs_again && begin != origin) {
            if constexpr (ptx::has_bulk_copy) ptx::fence_proxy_async();   // the output was staged over the stages
            ptx::bar_sync();                                              // all threads have read it
        } else if constexpr (ptx::has_bulk_copy) {
            if (threadIdx.x == 0) {
                for (int i = 0; i < Tiling::stages; ++i) {
                    ptx::mbarrier_init(address(&shared.full[i]), 1);
                    ptx::mbarrier_init(address(&shared.empty[i]), releases);
                }
                if constexpr (Tiling::keys_leave_early)
                    for (uint64_t &empty : shared.keys_empty) ptx::mbarrier_init(address(&empty), releases);
                ptx::fence_mbarrier_init();
            }
            ptx::bar_sync();   // all threads see the barriers
        }
        for (int index = begin; index < begin + ahead; ++index) fill<(Tiling::mean_vectors > 0)>(index);
    }

    // Fills the stage of a tile once all warps have released the tile before it. Called by all warps. The means' scores
    // are loaded only if with_means.
    template <bool with_means>
    __device__ void fill(int index) {
        if constexpr (ptx::has_bulk_copy) {
            if (!fills(index) || !ptx::elect_sync()) return;
            const int turn = place(index) / Tiling::stages, slot = place(index) % Tiling::stages;
            const uint32_t full = address(&shared.full[slot]);
            if (turn > 0) ptx::mbarrier_wait_parity(address(&shared.empty[slot]), (turn - 1) & 1);
            if constexpr (Tiling::keys_leave_early) {
                const int key_turn = place(index) / Tiling::key_stages;
                if (key_turn > 0)
                    ptx::mbarrier_wait_parity(address(&shared.keys_empty[place(index) % Tiling::key_stages]),
                                              (key_turn - 1) & 1);
            }
            const uint32_t mean_bytes = with_means && stages_means() ? mean_vectors * tile_keys * sizeof(float) : 0;
            ptx::mbarrier_arrive_expect_tx(full, Tiling::stage_bytes + mean_bytes);
            if constexpr (with_means)
                if (mean_bytes)
                    ptx::cp_async_bulk_shared_global(address(&shared.means.of_stage[slot]),
                                                     means + int64_t(index) * mean_step, mean_bytes, full);
            ptx::cp_async_bulk_shared_global(address(&stage_of(index).k()), k + index, sizeof(typename Tiling::Keys),
                                             full);
            ptx::cp_async_bulk_shared_global(address(&stage_of(index).v()), v + index, sizeof(typename Tiling::Values),
                                             full);
        } else {
            if (index < end) {
                copy(stage_of(index).k(), k + index);
                copy(stage_of(index).v(), v + index);
            }
            ptx::cp_async_commit_group();
        }
    }

    template <class Tile>
    __device__ void copy(Tile &target, const Tile *source) {
        for (uint32_t at = 16 * threadIdx.x; at < sizeof(Tile); at += 16 * Tiling::threads)
            ptx::cp_async_cg_16(address(&target) + at, reinterpret_cast<const char *>(source) + at, true);
    }

    // Waits for the stage of a tile, and starts filling another. Called by all warps, for every tile in order.
    template <bool with_means>
    __device__ typename Tiling::Stage take(int index) {
        if constexpr (ptx::has_bulk_copy) {
            if (!lean || fills(index + ahead)) {
                fill<with_means>(index + ahead);
                __syncwarp();
            }
            ptx::mbarrier_wait_parity(address(&shared.full[place(index) % Tiling::stages]),
                                      place(index) / Tiling::stages & 1);
        } else {
            ptx::cp_async_wait_group<0>();
            ptx::bar_sync();   // all threads see this tile and have read the stage to fill next
            fill<with_means>(index + ahead);
        }
        return stage_of(index);
    }

    // Whether the means' scores that this block needs fit in the stages, which then hold them; the scores of a tile.
    __device__ bool stages_means() const {
        return Tiling::mean_vectors > 0 && mean_vectors > 0 && mean_vectors <= Tiling::mean_vectors;
    }
    __device__ const float *means_of(int index) const {
        if constexpr (Tiling::mean_vectors > 0) return shared.means.of_stage[place(index) % Tiling::stages];
        else return nullptr;
    }

    // Two values in 16 bits of a key, counted from tile 0: those in the columns 8 j .. 8 j + 7 that this lane holds in
    // accumulators.
    __device__ uint32_t value_pair(int key, int j) const {
        const uint4 &chunk = v[key / tile_keys].at(key % tile_keys, j);
        return reinterpret_cast<const uint32_t *>(&chunk)[accumulator_column(0) / 2];
    }

    // Releases K of a tile for this warp, if K has stages of its own.
    __device__ void release_keys(int index) {
        if constexpr (Tiling::keys_leave_early) arrive(shared.keys_empty[place(index) % Tiling::key_stages]);
    }

    // Releases a tile for this warp, after its K.
    __device__ void release(int index) {
        if constexpr (ptx::has_bulk_copy) arrive(shared.empty[place(index) % Tiling::stages]);
    }

    __device__ void arrive(uint64_t &empty) {
        __syncwarp();   // all its lanes are done with the tile
        if (lanes_speak || ptx::laneid() == 0) ptx::mbarrier_arrive(address(&empty));
    }
};

}   // namespace tile
