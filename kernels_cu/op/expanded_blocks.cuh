// Attention on block formats without block-scaled MMAs: a block expands each tile to 16 bits once, for all of its
// warps.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernel.cuh"
#include "../ptx/barrier.cuh"
#include "../tile/expanded.cuh"
#include "../tile/fragment.cuh"
#include "attention.cuh"
#include "staged_blocks.cuh"
#include "weights.cuh"

namespace op {

// Q expanded to 16 bits, in shared memory for lack of registers. Each lane stores and loads only its own fragments, so
// no barrier is needed.
template <class Format, int slices, int dim, int threads>
struct ExpandedQueries {
    uint4 fragments[dim / 16][slices][threads];

    __device__ void store(const BlockQueries<Format, slices, dim, false> &q) {
        static_for<slices>([&](auto slice) {
            static_for<BlockQueries<Format, slices, dim, false>::steps>([&](auto step) {
                constexpr int word = step / Format::steps_per_word,
                              byte = step % Format::steps_per_word * (4 / Format::steps_per_word);
                tile::FragmentA a[tile::Expansion<Format>::fragments];
                tile::expand_a<Format, byte, word % 2>(a, q.codes[slice][step], q.scales[slice][word / 2]);
#pragma unroll
                for (int i = 0; i < tile::Expansion<Format>::fragments; ++i)
                    fragments[step * tile::Expansion<Format>::fragments + i][slice][threadIdx.x] = {a[i][0], a[i][1],
                                                                                                    a[i][2], a[i][3]};
            });
        });
    }

    // Columns 16 step .. + 15 in the order of tile::expand_chunk.
    __device__ void load(tile::FragmentA (&a)[slices], int step) const {
#pragma unroll
        for (int slice = 0; slice < slices; ++slice) {
            const uint4 registers = fragments[step][slice][threadIdx.x];
            a[slice][0] = registers.x, a[slice][1] = registers.y, a[slice][2] = registers.z, a[slice][3] = registers.w;
        }
    }
};

// o += P V and the sums of P, with V expanded to 16 bits.
template <class Softmax, class Format, int slices, int dim_v, int tiles>
__device__ inline void add_weighted(Softmax &softmax, const ProbabilityFragments<Format, tiles> (&p)[slices],
                                    const tile::SharedTile<dim_v, 16 * tiles> &v) {
    using To = tile::Expansion<Format>;
    using Tile = tile::SharedTile<dim_v, 16 * tiles>;
    const tile::FragmentB ones = {To::one, To::one};
    const uint32_t address = tile::address_b(v);
#pragma unroll
    for (int step = 0; step < ProbabilityFragments<Format, tiles>::steps; ++step) {
        tile::FragmentA a[slices][To::fragments];
#pragma unroll
        for (int slice = 0; slice < slices; ++slice)
            tile::expand_a<Format, 0, 0, Softmax::P::scaled>(a[slice], p[slice].codes[step], p[slice].scales[step]);
#pragma unroll
        for (int i = 0; i < To::fragments; ++i) {
#pragma unroll
            for (int pair = 0; pair < dim_v / 16; ++pair) {
                tile::FragmentB b[2];
                tile::load_b<Tile>(b, address, 16 * pair, 2 * (To::fragments * step + i));
#pragma unroll
                for (int slice = 0; slice < slices; ++slice)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        tile::multiply(softmax.o[slice][2 * pair + half], a[slice][i], b[half], typename To::Element{});
            }
#pragma unroll
            for (int slice = 0; slice < slices; ++slice)
                tile::multiply(softmax.o[slice][Softmax::sum_column], a[slice][i], ones, typename To::Element{});
        }
    }
}

// The warps of a block multiply tiles expanded to 16 bits: K, and V if it is in codes. The members are those of
// StagedTiles.
template <class Tiling>
struct ExpandedTiles {
    using ScoreFormat = typename Tiling::ScoreFormat;
    static constexpr bool expands_values = Tiling::ValueFormat::bits < 16;
    struct Nothing {};
    struct Values {
        tile::SharedTile<Tiling::dim_v, 2 * tile::tile_keys> values;
    };
    struct Shared : std::conditional_t<expands_values, Values, Nothing> {
        ExpandedQueries<ScoreFormat, Tiling::slices, Tiling::dim, Tiling::threads> queries;
        tile::SharedTile<tile::tile_keys, 2 * Tiling::dim> keys;
    };

    BlockQueries<ScoreFormat, Tiling::slices, Tiling::dim, Tiling::rolled> q;

    template <class AllShared, class Operands>
    __device__ void start(AllShared &shared, const Operands &operands, const Problem &problem, int warp_row) {
        operands.load(q, problem, warp_row);
        shared.queries.store(q);
    }

    template <class Order, class AllShared, class Pipeline>
    __device__ void prepare(AllShared &shared, const typename Tiling::Stage &stage, Pipeline &pipeline, int index) {
        ptx::bar_sync();   // all threads have read the tile before
        tile::expand_keys<Order, Tiling::threads>(shared.keys, stage.k());
        if constexpr (expands_values) {
            tile::expand_values<Tiling::threads>(shared.values, stage.v());
            pipeline.release(index);
        }
        ptx::bar_sync();   // all threads see the tile
    }

    template <class Order, class AllShared, class Scores>
    __device__ void multiply(Scores &s, AllShared &shared, const typename Tiling::Stage &) {
        multiply_scores<typename tile::Expansion<ScoreFormat>::Element, Tiling::dim, decltype(shared.keys)>(
            s, shared.queries, tile::address_b(shared.keys));
    }

    template <bool masked, bool sums, class Softmax, class AllShared, class Scores>
    __device__ __forceinline__ void add(Softmax &softmax, Scores &s, AllShared &shared,
                                        const typename Tiling::Stage &stage, float factor) {
        if constexpr (expands_values) softmax.template add<masked, sums>(s, shared.values, factor);
        else softmax.template add<masked, sums>(s, stage.v(), factor);
    }

    template <class Pipeline>
    __device__ void release(Pipeline &pipeline, int index) {
        if constexpr (!expands_values) pipeline.release(index);
    }
};

}   // namespace op
