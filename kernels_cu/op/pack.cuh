// Keys and values quantized into the tiles that attention reads.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../ptx/barrier.cuh"
#include "../tile/block_tiles.cuh"
#include "../tile/narrow.cuh"
#include "../tile/packing.cuh"
#include "../tile/scale.cuh"
#include "keys.cuh"

namespace op {

constexpr int tile_keys = 64;

// How a block is encoded: encode<Blocks>(values, codes) gives its scale. A lane has Blocks::groups groups of eight of its
// values, and Blocks joins what lanes found of it. The bytes are those of the quantizer of the format.
template <class Narrow>
struct MxEncoder {
    static constexpr uint32_t one = 0x7f;   // the scale that stands for 1
    static constexpr bool takes_pairs = true;
    tile::ScaleRule rule;

    __device__ MxEncoder(int rule, const float *) : rule(tile::ScaleRule(rule)) {}

    template <class Blocks>
    __device__ uint32_t encode(const float (&values)[Blocks::groups][8], tile::Codes<Narrow::bits> (&codes)[Blocks::groups]) const {
        float amax = 0.0f;
#pragma unroll
        for (int i = 0; i < Blocks::groups; ++i) amax = ptx::max_nan_f32(amax, tile::amax_of(values[i]));
        const uint32_t scale = tile::mx_scale<Narrow>(Blocks::amax(amax), rule);
#pragma unroll
        for (int i = 0; i < Blocks::groups; ++i) {
            codes[i] = tile::encode_scaled<Narrow>(values[i], scale);
#pragma unroll
            for (uint32_t &word : codes[i].word)
                if (scale == tile::ue8m0_nan) word = 0;
        }
        return scale;
    }

    // The same of pairs of bf16, which takes fewer instructions.
    template <class Blocks>
    __device__ uint32_t encode(const uint32_t (&pairs)[Blocks::groups][4], tile::Codes<Narrow::bits> (&codes)[Blocks::groups]) const {
        uint32_t largest = 0;
#pragma unroll
        for (const auto &group : pairs)
#pragma unroll
            for (uint32_t pair : group) largest = ptx::max_nan_bf16x2(largest, ptx::abs_bf16x2(pair));
        const uint32_t scale = tile::mx_scale<Narrow>(Blocks::amax(ptx::max_nan_f32(ptx::low_bf16(largest), ptx::high_bf16(largest))), rule);
#pragma unroll
        for (int i = 0; i < Blocks::groups; ++i) {
            codes[i] = tile::encode_scaled<Narrow>(pairs[i], scale);
#pragma unroll
            for (uint32_t &word : codes[i].word)
                if (scale == tile::ue8m0_nan) word = 0;
        }
        return scale;
    }
};

struct Nvfp4Encoder {
    static constexpr uint32_t one = 0x38;
    static constexpr bool takes_pairs = false;
    tile::Nvfp4Global global;
    bool four_over_six;

    __device__ Nvfp4Encoder(int rule, const float *global_scale) : global(global_scale ? *global_scale : 1.0f), four_over_six(rule == 1) {}

    template <class Blocks>
    __device__ uint32_t encode(const float (&values)[Blocks::groups][8], tile::Codes<4> (&codes)[Blocks::groups]) const {
        float amax = 0.0f;
#pragma unroll
        for (int i = 0; i < Blocks::groups; ++i) amax = ptx::max_nan_f32(amax, tile::amax_of(values[i]));
        amax = Blocks::amax(amax);
        tile::Nvfp4Scale scale;
        if (!four_over_six) {
            encode_to<false, Blocks>(scale, values, amax, tile::Nvfp4Target::six, codes);
            return scale.code;
        }
        const float error = encode_to<true, Blocks>(scale, values, amax, tile::Nvfp4Target::six, codes);
        tile::Nvfp4Scale other;
        tile::Codes<4> other_codes[Blocks::groups];
        const float other_error = encode_to<true, Blocks>(other, values, amax, tile::Nvfp4Target::four, other_codes);
        if (scale.step != 0.0f && other_error < error) {
            scale = other;
#pragma unroll
            for (int i = 0; i < Blocks::groups; ++i) codes[i] = other_codes[i];
        }
        return scale.code;
    }

private:
    // The scale for a target and the codes under it; returns the squared error where `with_error`. By the whole warp, for what
    // lanes exchange.
    template <bool with_error, class Blocks>
    __device__ float encode_to(tile::Nvfp4Scale &scale, const float (&values)[Blocks::groups][8], float amax, tile::Nvfp4Target target,
                               tile::Codes<4> (&codes)[Blocks::groups]) const {
        float quotients[Blocks::groups][8];
#pragma unroll
        for (int i = 0; i < 8 * Blocks::groups; ++i) quotients[i / 8][i % 8] = values[i / 8][i % 8];
        // Errors need the quotients as they are, also the few beyond 7 of the smallest steps; codes alone do not.
        scale = tile::divide_by_step(quotients, amax, target, global, with_error ? 16.0f : 6.5f);
        tile::encode_nvfp4<!with_error>(quotients, scale, codes);
        if constexpr (with_error) {
            float errors[Blocks::groups];
#pragma unroll
            for (int i = 0; i < Blocks::groups; ++i) errors[i] = tile::squared_error(quotients[i], codes[i], scale);
            static_assert(Blocks::groups <= 2, "a sum in the order of the definition");
            return Blocks::sum(Blocks::groups == 1 ? errors[0] : __fadd_rn(errors[0], errors[Blocks::groups - 1]));
        } else {
            return 0.0f;
        }
    }
};

template <class Format>
struct EncoderOf;
template <>
struct EncoderOf<tile::Mxfp8> {
    using Type = MxEncoder<tile::E4m3>;
};
template <>
struct EncoderOf<tile::Mxfp4> {
    using Type = MxEncoder<tile::E2m1>;
};
template <>
struct EncoderOf<tile::Nvfp4> {
    using Type = Nvfp4Encoder;
};

// Where tiles go: packed[batch, heads, tiles, tile_bytes]. The grid is tiles x heads x batch.
struct Packed {
    uint8_t *first;
    int tiles;

    // The tile of this block.
    __device__ uint8_t *tile(size_t head, size_t tile_bytes) const { return first + (head * tiles + blockIdx.x) * tile_bytes; }
};

// The axes and strides of every packing entry, in order.
#define PACK_AXES(x) int batch, int heads, int keys, int cols, int tiles, int tile_bytes, KEY_STRIDES(x)

// One tile of keys, less mean[batch, heads, cols] where that is given. Blocks without any value of x have a scale of 1.
template <class Tile, class Element>
__device__ inline void pack_keys(Tile &tile, const KeyArray<Element> &x, Packed packed, const float *mean, int rule, const float *global_scale) {
    using Packing = tile::KeyPacking<Tile>;
    using Blocks = typename Packing::Blocks;
    using Encoder = typename EncoderOf<typename Tile::Format>::Type;
    const tile::Rows<Element> rows = x.rows(blockIdx.x * tile_keys, tile_keys);
    tile::Eight<Element> loaded[Blocks::groups][Packing::items];
#pragma unroll
    for (int group = 0; group < Blocks::groups; ++group)
        rows.load(loaded[group], Packing::row(), Packing::step, Packing::column() + 8 * group);
    float mean_values[Blocks::groups][8] = {};
    if (mean) {
#pragma unroll
        for (int group = 0; group < Blocks::groups; ++group) {
            tile::Eight<float> of_columns[1];
            tile::Rows<float>(mean + x.head() * x.cols, 0, 1, x.cols).load(of_columns, 0, 0, Packing::column() + 8 * group);
            of_columns[0].unpack(mean_values[group]);
        }
    }

    const Encoder encoder(rule, global_scale);
#pragma unroll
    for (int item = 0; item < Packing::items; ++item) {
        const int row = Packing::row() + item * Packing::step;
        float values[Blocks::groups][8];
#pragma unroll
        for (int group = 0; group < Blocks::groups; ++group) {
            loaded[group][item].unpack(values[group]);
            if (mean && row < rows.rows) {
#pragma unroll
                for (int i = 0; i < 8; ++i) values[group][i] -= mean_values[group][i];
            }
        }
        tile::Codes<Tile::Format::bits> codes[Blocks::groups];
        const uint32_t scale = encoder.template encode<Blocks>(values, codes);
        Packing::put(tile, row, codes, rows.holds(row, Packing::first_of_block()) ? scale : Encoder::one);
    }
    ptx::bar_sync();   // the tile is whole
    tile::copy_out<Packing::threads>(tile, packed.tile(x.head(), sizeof(Tile)));
}

// One tile of values in 16 bits, SharedTile<64, 2 dim_v>: rounded to nearest, ties to even.
template <class Narrow, int dim_v, class Element>
__device__ inline void pack_values_16(const KeyArray<Element> &x, Packed packed) {
    using Tile = tile::SharedTile<tile_keys, dim_v * 2>;
    using Packing = tile::RowPacking<tile_keys, dim_v>;
    tile::Eight<Element> loaded[Packing::items];
    x.rows(blockIdx.x * tile_keys, tile_keys).load(loaded, Packing::row(), Packing::step, Packing::column());
    Tile &tile = *reinterpret_cast<Tile *>(packed.tile(x.head(), sizeof(Tile)));
#pragma unroll
    for (int item = 0; item < Packing::items; ++item) {
        float values[8];
        loaded[item].unpack(values);
        tile.at(Packing::row() + item * Packing::step, Packing::column() / 8) = tile::pack(values, Narrow{});
    }
}

// A tile of values on its way: as loaded, and as written.
template <class Tile, class Element>
struct PackValuesShared {
    Tile tile;
    typename tile::ValuePacking<Tile, Element>::Staged staged;
};

// One tile of values. Blocks without any value of x have a scale of 1.
template <class Tile, class Element>
__device__ inline void pack_values(PackValuesShared<Tile, Element> &shared, const KeyArray<Element> &x, Packed packed, int rule,
                                   const float *global_scale) {
    using Packing = tile::ValuePacking<Tile, Element>;
    using Blocks = typename Packing::Blocks;
    using Encoder = typename EncoderOf<typename Tile::Format>::Type;
    const tile::Rows<Element> rows = x.rows(blockIdx.x * tile_keys, tile_keys);
    Packing::load(shared.staged, rows);
    ptx::cp_async_commit_group();
    const Encoder encoder(rule, global_scale);
    Packing::put_rest(shared.tile);
    ptx::cp_async_wait_group<0>();
    ptx::bar_sync();   // all values are there

#pragma unroll 1
    for (int block = 0; block < Packing::thread_blocks; ++block) {
        std::conditional_t<Encoder::takes_pairs && tile::is_bf16<Element>, uint32_t[Blocks::groups][4], float[Blocks::groups][8]> values;
        Packing::unpack(shared.staged, block, values);
        tile::Codes<Tile::Format::bits> codes[Blocks::groups];
        const uint32_t scale = encoder.template encode<Blocks>(values, codes);
        const bool present = rows.holds(Packing::first_key() + block * Tile::Format::block, Packing::column());
        Packing::put(shared.tile, block, codes, present ? scale : Encoder::one);
    }
    ptx::bar_sync();   // the tile is whole
    tile::copy_out<Packing::threads>(shared.tile, packed.tile(x.head(), sizeof(Tile)));
}

}  // namespace op
