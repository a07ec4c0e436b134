// Keys and values quantized into the tiles that attention reads.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../ptx/barrier.cuh"
#include "../tile/block_tiles.cuh"
#include "../tile/narrow.cuh"
#include "../tile/packing.cuh"
#include "../tile/run.cuh"
#include "../tile/scale.cuh"
#include "../tile/thresholds.cuh"
#include "keys.cuh"

namespace op {

// Encoders of a block: encode<Blocks>(values, codes, scale, common), with the bytes of the format's quantizer. A lane
// has Blocks::groups groups of eight values of the block, and Blocks combines the results of its lanes. If takes_pairs,
// an overload takes pairs of 16-bit elements in fewer instructions. If has_others, common = std::true_type encodes
// common blocks only: for others it returns false, and its codes are undefined. std::false_type encodes any block.
template <class Narrow>
struct MxEncoder {
    static constexpr uint32_t one = 0x7f;   // the scale that stands for 1
    static constexpr bool has_others = false;
    template <class Element>
    static constexpr bool takes_pairs = tile::is_bf16<Element>;
    tile::ScaleRule rule;

    __device__ MxEncoder(int rule, const float *) : rule(tile::ScaleRule(rule)) {}

    template <class Blocks>
    __device__ bool encode(const float (&values)[Blocks::groups][8], tile::Codes<Narrow::bits> (&codes)[Blocks::groups],
                           uint32_t &scale, std::true_type) const {
        float amax = 0.0f;
#pragma unroll
        for (const auto &group : values) amax = ptx::max_nan_f32(amax, tile::amax_of(group));
        return encode_scaled<Blocks>(values, amax, codes, scale);
    }

    template <class Blocks, class Element>
    __device__ bool encode(const uint4 (&pairs)[Blocks::groups], tile::Codes<Narrow::bits> (&codes)[Blocks::groups],
                           uint32_t &scale) const {
        uint32_t words[Blocks::groups][4];
#pragma unroll
        for (int i = 0; i < Blocks::groups; ++i)
            words[i][0] = pairs[i].x, words[i][1] = pairs[i].y, words[i][2] = pairs[i].z, words[i][3] = pairs[i].w;
        return encode_scaled<Blocks>(words, tile::amax_of(pairs, Element{}), codes, scale);
    }

private:
    template <class Blocks, class Values>
    __device__ bool encode_scaled(const Values &values, float amax, tile::Codes<Narrow::bits> (&codes)[Blocks::groups],
                                  uint32_t &scale) const {
        scale = tile::mx_scale<Narrow>(Blocks::amax(amax), rule);
#pragma unroll
        for (int i = 0; i < Blocks::groups; ++i) {
            codes[i] = tile::encode_scaled<Narrow>(values[i], scale);
#pragma unroll
            for (uint32_t &word : codes[i].word)
                if (scale == tile::ue8m0_nan) word = 0;
        }
        return true;
    }
};

struct Nvfp4Encoder {
    static constexpr uint32_t one = 0x38;
    static constexpr bool has_others = true;
    template <class Element>
    static constexpr bool takes_pairs = tile::uses_thresholds<Element>;
    tile::Nvfp4Global global;
    bool four_over_six;   // if so, no block is common

    __device__ Nvfp4Encoder(int rule, const float *global_scale)
        : global(global_scale ? *global_scale : 1.0f), four_over_six(rule == 1) {}

    template <class Blocks>
    __device__ bool encode(const float (&values)[2][8], tile::Codes<4> (&codes)[2], uint32_t &scale_code,
                           std::true_type) const {
        const float amax = amax_of(values);
        const tile::Nvfp4Scale scale = tile::plain_nvfp4_scale(amax, global);
        const tile::Divisor divisor = tile::Divisor::plain(scale.step * (1.0f / tile::E2m1::unit));
#pragma unroll
        for (int group = 0; group < 2; ++group) {
            float quotients[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) quotients[i] = divisor.quotient(values[group][i]);
            codes[group] = tile::E2m1::encode_below_7(quotients);
        }
        scale_code = scale.code;
        return !four_over_six && amax <= global.most && (amax >= global.least || amax == 0.0f);
    }

    template <class Blocks, class Element>
    __device__ bool encode(const uint4 (&pairs)[2], tile::Codes<4> (&codes)[2], uint32_t &scale_code) const {
        const tile::Share<Element, tile::nvfp4_block> block{pairs[0], pairs[1]};
        const float amax = block.amax();
        const tile::Nvfp4Scale scale = tile::plain_nvfp4_scale(amax, global);
        block.encode(tile::E2m1Thresholds<Element>({scale.step, amax}), codes);
        scale_code = scale.code;
        return !four_over_six && tile::has_thresholds<Element>(amax, global);
    }

    template <class Blocks>
    __device__ bool encode(const float (&values)[2][8], tile::Codes<4> (&codes)[2], uint32_t &scale_code,
                           std::false_type) const {
        static_assert(Blocks::lanes == 1, "a sum of errors in the order of the definition");
        scale_code = four_over_six ? tile::encode_nvfp4_block<true>(values, amax_of(values), global, codes).code
                                   : tile::encode_nvfp4_block<false>(values, amax_of(values), global, codes).code;
        return true;
    }

private:
    __device__ static float amax_of(const float (&values)[2][8]) {
        return ptx::max_nan_f32(tile::amax_of(values[0]), tile::amax_of(values[1]));
    }
};

// Encodes `items` blocks of each thread: encode(item, common) encodes one, or returns that it must be encoded again.
// All blocks are encoded as common ones first, without branches, then the others one by one.
template <class Encoder, int items, class Encode>
__device__ inline void encode_blocks(Encode &&encode) {
    uint32_t others = 0;
#pragma unroll
    for (int item = 0; item < items; ++item) others |= uint32_t(!encode(item, std::true_type{})) << item;
    if constexpr (Encoder::has_others) {
#pragma unroll 1
        for (; others; others &= others - 1) encode(__ffs(others) - 1, std::false_type{});
    }
}

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

// The output tiles: packed[batch, heads, tiles, tile_bytes]. The grid is tiles x heads x batch.
struct Packed {
    uint8_t *first;   // [batch, heads, tiles, tile_bytes]
    int tiles;

    // The tile of this block.
    __device__ uint8_t *tile(size_t head, size_t tile_bytes) const {
        return first + (head * tiles + blockIdx.x) * tile_bytes;
    }
};

// The axes and strides of every packing entry, in order.
#define PACK_AXES(x) int batch, int heads, int keys, int cols, int sequences, int tiles, int tile_bytes, KEY_STRIDES(x)

// A tile as it is written, and its values as loaded.
template <class Tile, class Element, int dim>
struct PackShared {
    Tile tile;
    tile::Staged<Element, tile::tile_keys, dim> staged;
};

// Packs one tile of keys, minus mean[sequences, heads, cols] unless that is null. Blocks without values of x have a
// scale of 1.
template <class Tile, class Element>
__device__ inline void pack_keys(PackShared<Tile, Element, Tile::dim> &shared, const KeyArray<Element> &x,
                                 Packed packed, const float *mean, int rule, const float *global_scale) {
    using Packing = tile::KeyPacking<Tile>;
    using Blocks = typename Packing::Blocks;
    using Encoder = typename EncoderOf<typename Tile::Format>::Type;
    // The rows of the tile, and the mean of their columns.
    const KeyUnit unit = x.unit(blockIdx.x, tile::tile_keys);
    const tile::Rows<Element> rows = x.rows(unit);
    shared.staged.template load<Packing::threads>(rows);
    ptx::cp_async_commit_group();
    tile::Eight<float> of_columns[Blocks::groups][1] = {};
    if (mean) {
#pragma unroll
        for (int group = 0; group < Blocks::groups; ++group)
            tile::Rows<float>(mean + x.head(unit.sequence) * x.cols, 0, 1, x.cols)
                .load(of_columns[group], 0, 0, Packing::column() + 8 * group);
    }
    const Encoder encoder(rule, global_scale);
    ptx::cp_async_wait_group<0>();
    ptx::bar_sync();   // all values are there

    // Codes and scales of this thread's blocks.
    encode_blocks<Encoder, Packing::items>([&](int item, auto common) {
        const int row = Packing::row() + item * Packing::step;
        float values[Blocks::groups][8];
        Packing::unpack(shared.staged, item, values);
        if (mean && row < rows.rows) {
#pragma unroll
            for (int group = 0; group < Blocks::groups; ++group) {
                float mean_values[8];
                of_columns[group][0].unpack(mean_values);
#pragma unroll
                for (int i = 0; i < 8; ++i) values[group][i] -= mean_values[i];
            }
        }
        tile::Codes<Tile::Format::bits> codes[Blocks::groups];
        uint32_t scale;
        const bool done = encoder.template encode<Blocks>(values, codes, scale, common);
        Packing::put(shared.tile, item, codes, rows.holds(row, Packing::first_of_block()) ? scale : Encoder::one);
        return done;
    });
    ptx::bar_sync();   // the tile is whole
    tile::copy_out<Packing::threads>(shared.tile, packed.tile(x.head(), sizeof(Tile)));
}

// Packs one tile of values in 16 bits, SharedTile<64, 2 dim_v>, rounded to nearest, ties to even.
template <class Narrow, int dim_v, class Element>
__device__ inline void pack_values_16(const KeyArray<Element> &x, Packed packed) {
    using Tile = tile::SharedTile<tile::tile_keys, dim_v * 2>;
    using Packing = tile::RowPacking<tile::tile_keys, dim_v, 8>;
    tile::Eight<Element> loaded[Packing::items];
    x.rows(x.unit(blockIdx.x, tile::tile_keys)).load(loaded, Packing::row(), Packing::step, Packing::column());
    Tile &tile = *reinterpret_cast<Tile *>(packed.tile(x.head(), sizeof(Tile)));
#pragma unroll
    for (int item = 0; item < Packing::items; ++item) {
        float values[8];
        loaded[item].unpack(values);
        tile.at(Packing::row() + item * Packing::step, Packing::column() / 8) = tile::pack(values, Narrow{});
    }
}

// Packs one tile of values. Blocks without values of x have a scale of 1.
template <class Tile, class Element>
__device__ inline void pack_values(PackShared<Tile, Element, Tile::dim_v> &shared, const KeyArray<Element> &x,
                                   Packed packed, int rule, const float *global_scale) {
    using Packing = tile::ValuePacking<Tile>;
    using Blocks = typename Packing::Blocks;
    using Encoder = typename EncoderOf<typename Tile::Format>::Type;
    // The rows of the tile.
    const tile::Rows<Element> rows = x.rows(x.unit(blockIdx.x, tile::tile_keys));
    shared.staged.template load<Packing::threads>(rows);
    ptx::cp_async_commit_group();
    const Encoder encoder(rule, global_scale);
    Packing::put_rest(shared.tile);
    ptx::cp_async_wait_group<0>();
    ptx::bar_sync();   // all values are there

    // Codes and scales of this thread's blocks.
    encode_blocks<Encoder, Packing::items>([&](int block, auto common) {
        tile::Codes<Tile::Format::bits> codes[Blocks::groups];
        uint32_t scale;
        bool done;
        if constexpr (Encoder::template takes_pairs<Element> && common) {
            uint4 pairs[Blocks::groups];
            Packing::unpack(shared.staged, block, pairs);
            done = encoder.template encode<Blocks, Element>(pairs, codes, scale);
        } else {
            float values[Blocks::groups][8];
            Packing::unpack(shared.staged, block, values);
            done = encoder.template encode<Blocks>(values, codes, scale, common);
        }
        Packing::put(shared.tile, block, codes,
                     rows.holds(block * Tile::Format::block, Packing::column()) ? scale : Encoder::one);
        return done;
    });
    ptx::bar_sync();   // the tile is whole
    tile::copy_out<Packing::threads>(shared.tile, packed.tile(x.head(), sizeof(Tile)));
}

constexpr int unpack_warps = 8;   // of a block, each with a row

// y[heads, keys, words] = the rows of packed sequences from x[heads, rows, words], in which each sequence begins with a
// new tile. The grid is keys x heads.
__device__ inline void unpack_rows(const uint32_t *x, const int *key_starts, uint32_t *y, int rows, int keys, int words,
                                   int sequences) {
    const int key = blockIdx.x * unpack_warps + threadIdx.x / 32;
    if (key >= keys) return;
    const int sequence = sequence_of(key_starts, sequences, key), start = __ldg(key_starts + sequence);
    const int row = first_unit(start, sequence, tile::tile_keys) * tile::tile_keys + key - start;
    const uint32_t *source = x + (size_t(blockIdx.y) * rows + row) * words;
    uint32_t *target = y + (size_t(blockIdx.y) * keys + key) * words;
    for (int word = threadIdx.x % 32; word < words; word += 32) target[word] = source[word];
}

}   // namespace op
