// Loads and stores of kernels that compute rows from rows, between two matrix products. The output is in 16 or 32 bits,
// or in codes and scales of a block format. A lane has shares of 16 consecutive values.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernel.cuh"
#include "../ptx/access.cuh"
#include "../ptx/cvt_scaled.cuh"
#include "../tile/rows.cuh"
#include "../tile/split_reciprocal.cuh"
#include "ending.cuh"

namespace op {

constexpr int produce_threads = 256, produce_share = 16;

// Whether rows of `cols` values are whole blocks and every eight values are 16-byte aligned. No share of such rows
// crosses the end of a row, so it needs no checks.
template <class Element>
__device__ inline bool is_whole_rows(const Element *first, int64_t stride, int cols) {
    return cols % (2 * produce_share) == 0 && is_chunk(first) && stride % 8 == 0;
}

// `count` shares of a lane, of one row, as loaded: all loads are issued before the first value is used.
template <class Element, int count>
struct RowShares {
    tile::Eight<Element> eights[count][2];

    __device__ void clear() {
#pragma unroll
        for (auto &share : eights) share[0].clear(), share[1].clear();
    }

    // Loads the shares from `column` on, `step` columns apart, of a row of `cols` values. Shares past the end of a
    // whole row are left as they were; past the end of others are zeros.
    template <bool whole>
    __device__ void load(const Element *row, int column, int step, int cols) {
        const Element *source = row + column;
        int here = cols - column;
#pragma unroll
        for (int i = 0; i < count; ++i, source += step, here -= step) {
            if constexpr (whole) {
                if (here > 0) eights[i][0].load(source), eights[i][1].load(source + 8);
            } else {
                const bool chunks = cols % 8 == 0 && is_chunk(row);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int left = here - 8 * j;
                    if (left <= 0) eights[i][j].clear();
                    else if (chunks) eights[i][j].load(source + 8 * j);
                    else eights[i][j].load(source + 8 * j, left);
                }
            }
        }
    }

    // Loads one share that begins within its row.
    template <bool whole>
    __device__ void load(const Element *row, int column, int cols) {
        static_assert(count == 1);
        if constexpr (whole) load<true>(row + column, 0, 0, 1);
        else load<false>(row, column, 0, cols);
    }

    // The same; zeros for a missing row.
    __device__ void load(const Element *row, bool present, int column, int step, int cols) {
        load<false>(row, column, step, present ? cols : 0);
    }

    __device__ void unpack(int share, float (&values)[2][8]) const {
        eights[share][0].unpack(values[0]);
        eights[share][1].unpack(values[1]);
    }

    // Rounded to nearest, ties to even.
    __device__ void pack(int share, const float (&values)[2][8]) {
        constexpr int per_chunk = tile::elements_per_chunk<Element>;
#pragma unroll
        for (int i = 0; i < produce_share; i += per_chunk) {
            float some[per_chunk];
#pragma unroll
            for (int j = 0; j < per_chunk; ++j) some[j] = values[(i + j) / 8][(i + j) % 8];
            chunk(share * 2 * of_eight + i / per_chunk) = tile::pack(some, Element{});
        }
    }

    // To shared memory and back, in chunks of 16 bytes with a stride of `apart` chunks.
    __device__ void put(uint4 *target, int apart) const {
#pragma unroll
        for (int i = 0; i < 2 * count * tile::Eight<Element>::chunks; ++i) target[i * apart] = chunk(i);
    }
    __device__ void get(const uint4 *source, int apart) {
#pragma unroll
        for (int i = 0; i < 2 * count * tile::Eight<Element>::chunks; ++i) chunk(i) = source[i * apart];
    }

    // Stores all shares consecutively, to a 16-byte aligned address.
    __device__ void store(Element *target) const {
#pragma unroll
        for (int i = 0; i < 2 * count * tile::Eight<Element>::chunks; ++i)
            tile::store(target + i * tile::elements_per_chunk<Element>, chunk(i));
    }

    // Stores the shares of a pair of lanes, which are consecutive in memory; see tile::store_paired.
    __device__ void store_paired(Element *target, bool stored) const {
        static_assert(count == 1 && of_eight == 1);
        tile::store_paired(target, chunk(0), chunk(1), stored);
    }

private:
    static constexpr int of_eight = tile::Eight<Element>::chunks;
    __device__ uint4 &chunk(int i) { return eights[i / (2 * of_eight)][i / of_eight % 2].chunk[i % of_eight]; }
    __device__ const uint4 &chunk(int i) const {
        return eights[i / (2 * of_eight)][i / of_eight % 2].chunk[i % of_eight];
    }
};

// Stores a lane's share of a row. Only its first `here` values exist, unless the row is whole.
template <bool whole, class Element>
__device__ inline void store_values(Element *target, int here, const float (&values)[2][8]) {
    if constexpr (whole) {
        RowShares<Element, 1> share;
        share.pack(0, values);
        share.store(target);
    } else {
        store_share(target, here, values);
    }
}

// AnyRows with the type as a number, which is quick to test.
template <class Byte>
struct TypedRows {
    enum Type { none, bf16, f16, f32 };
    Byte *first;
    int64_t stride;   // in bytes
    Type type;

    template <class Rows>
    __device__ explicit TypedRows(const Rows &rows)
        : first(rows.bf16  ? reinterpret_cast<Byte *>(rows.bf16)
                : rows.f16 ? reinterpret_cast<Byte *>(rows.f16)
                           : reinterpret_cast<Byte *>(rows.f32)),
          stride(rows.stride * (rows.bf16 || rows.f16 ? 2 : 4)), type(rows.bf16  ? bf16
                                                                      : rows.f16 ? f16
                                                                      : rows.f32 ? f32
                                                                                 : none) {}

    __device__ int64_t bytes(int64_t elements) const { return elements * (type == f32 ? 4 : 2); }
    template <class Element>
    __device__ bool holds() const {
        return type == (tile::is_bf16<Element> ? bf16 : sizeof(Element) == 2 ? f16 : f32);
    }

    // Whether every eight values begin at a multiple of 16 bytes.
    __device__ bool is_whole() const { return is_chunk(first) && stride % 16 == 0; }

    // Loads a lane's share of row 0 from `column` on, of which `here` values exist. whole: of whole rows.
    template <bool whole>
    __device__ void load(int column, int here, float (&values)[2][8]) const {
        if (type == bf16) load_of<whole, __nv_bfloat16>(column, here, values);
        else if (type == f16) load_of<whole, __half>(column, here, values);
        else load_of<whole, float>(column, here, values);
    }

    // Stores a lane's share of the row at `target` if `stored`, rounded to nearest, ties to even. Called by the whole
    // warp.
    template <bool whole>
    __device__ void store(Byte *target, int column, int here, bool stored, const float (&values)[2][8]) const {
        if (type == bf16) store_of<whole, __nv_bfloat16>(target, column, here, stored, values);
        else if (type == f16) store_of<whole, __half>(target, column, here, stored, values);
        else store_of<whole, float>(target, column, here, stored, values);
    }

    template <bool whole, class Element>
    __device__ void load_of(int column, int here, float (&values)[2][8]) const {
        const Element *source = reinterpret_cast<const Element *>(first) + column;
        if constexpr (whole) {
            RowShares<Element, 1> share;
            share.template load<true>(source, 0, 0, 1);
            share.unpack(0, values);
        } else {
            load_share(source, here, values);
        }
    }

    template <bool whole, class Element>
    __device__ void store_of(Byte *row, int column, int here, bool stored, const float (&values)[2][8]) const {
        Element *target = reinterpret_cast<Element *>(row) + column;
        if constexpr (whole && sizeof(Element) == 2) {
            RowShares<Element, 1> share;
            share.pack(0, values);
            share.store_paired(target, stored);
        } else if (stored) {
            store_values<whole>(target, here, values);
        }
    }
};

// Values rounded to an element's precision: to nearest, ties to even.
template <class Element>
__device__ inline float rounded(float value) {
    return float(Element(value));
}
template <class Element>
__device__ inline void round_values(float (&values)[2][8]) {
    RowShares<Element, 1> share;
    share.pack(0, values);
    share.unpack(0, values);
}

// encode_share() of mxfp4 in fewer instructions.
__device__ inline uint32_t encode_mxfp4_share(const float (&values)[2][8], tile::ScaleRule rule,
                                              tile::LaneCodes<4, 2> &codes) {
    const float amax = ptx::max_nan_f32(tile::amax_of(values[0]), tile::amax_of(values[1]));
    const uint32_t scale = tile::mx_scale<tile::E2m1>(tile::RunBlocks<tile::mx_block, produce_share>::amax(amax), rule);
#pragma unroll
    for (int i = 0; i < 2; ++i)
        codes.word[i] = ptx::cvt_rn_satfinite_e2m1x8_scaled(values[i], tile::ue8m0_reciprocal(scale));
    if (scale == tile::ue8m0_nan) codes.clear();
    return scale;
}

// encode_nvfp4_share() of a whole block under the rule of the largest value, in fewer instructions. global.plain() only
// where SplitReciprocal serves.
__device__ inline uint32_t encode_nvfp4_block(const float (&values)[2][8], const tile::Nvfp4Global &global,
                                              tile::LaneCodes<4, 2> &codes) {
    float quotients[2][8];
    const auto each = [&](auto &&change) {
#pragma unroll
        for (int i = 0; i < 16; ++i) change(quotients[i / 8][i % 8], values[i / 8][i % 8]);
    };
    each([](float &quotient, float value) { quotient = value; });
    const float amax = ptx::max_nan_f32(tile::amax_of(values[0]), tile::amax_of(values[1]));
    tile::Nvfp4Scale scale;
    tile::SplitReciprocal reciprocal;
    if (global.plain(amax)) {
        scale = tile::plain_nvfp4_scale(amax, global);
        reciprocal = tile::SplitReciprocal(scale.step * (1.0f / tile::E2m1::unit));
    } else {
        scale = tile::divide_by_step(quotients, amax, tile::Nvfp4Target::six, global, 6.5f);
        if (scale.step == 0.0f) each([](float &quotient, float) { quotient = 0.0f; });
    }
    each([&](float &quotient, float) { quotient = reciprocal.quotient(quotient); });
#pragma unroll
    for (int i = 0; i < 2; ++i) codes.word[i] = ptx::cvt_rn_satfinite_e2m1x8_units_below_7(quotients[i]);
    return scale.code;
}

// What a kernel writes: `any`, as it was called, or that one alone. Of nvfp4 it is the rule of the largest value.
enum class Form { any, bf16, f16, f32, mxfp8, mxfp4, nvfp4 };

template <class Element>
constexpr Form form_of = tile::is_bf16<Element> ? Form::bf16
                         : sizeof(Element) == 2 ? Form::f16
                                                : Form::f32;

// The output rows of a kernel.
struct Produced {
    TypedRows<char> out;       // [rows, cols], or
    QuantizedRows quantized;   // [rows, cols], if its format is not `none`
    int64_t rows;
    int cols;
    bool splits;   // whether tile::SplitReciprocal serves the global scale

    __device__ bool quantizes() const { return quantized.format != EndingFormat::none; }

    // The number of rows, with padding if scales are in 128x4 tiles.
    __device__ int64_t end() const {
        constexpr int64_t tile = tile::scale_tile_rows;
        return quantizes() && quantized.places.swizzled ? ceil_div(rows, tile) * tile : rows;
    }

    __device__ bool is_whole() const { return cols % (2 * produce_share) == 0 && (quantizes() || out.is_whole()); }

    // A row to read for this row: the last one if it is padding.
    __device__ int64_t present(int64_t row) const { return row < rows ? row : rows - 1; }

    // Whether a form is a block format; `any` may be.
    static constexpr bool quantizes(Form form) { return form >= Form::mxfp8 || form == Form::any; }

    // The addresses of a row, computed once per lane.
    struct Row {
        int64_t number;
        bool present;
        char *out;                 // for floats; or
        uint8_t *codes, *scales;   // of its first block
    };
    // number: int64_t or, with less arithmetic, uint32_t.
    template <Form form = Form::any, class Number>
    __device__ Row row(Number number) const {
        Row row = {number, number < rows, nullptr, nullptr, nullptr};
        if (quantizes(form) && (form != Form::any || quantizes())) {
            row.codes = quantized.codes + number * quantized.code_bytes;
            if constexpr (sizeof(Number) == 4) row.scales = quantized.scales + scales_of(number);
            else row.scales = quantized.scales + quantized.places.at(number, 0);
        } else {
            row.out = out.first + number * out.stride;
        }
        return row;
    }

    // Moves a Row `step` rows on, to row `number`.
    template <Form form>
    __device__ void move(Row &row, uint32_t number, uint32_t step) const {
        row.number = number, row.present = number < uint32_t(rows);
        if constexpr (quantizes(form)) {
            row.codes += step * quantized.code_bytes;
            if (quantized.places.swizzled) row.scales = quantized.scales + scales_of(number);
            else row.scales += step * quantized.places.stride;
        } else {
            row.out += step * out.stride;
        }
    }

    // The form of these rows; `any` if a rule needs it.
    __device__ Form form() const {
        switch (quantized.format) {
            case EndingFormat::mxfp8:
                return Form::mxfp8;
            case EndingFormat::mxfp4:
                return Form::mxfp4;
            case EndingFormat::nvfp4:
                return quantized.rule ? Form::any : Form::nvfp4;
            default:
                return out.type == out.bf16 ? Form::bf16 : out.type == out.f16 ? Form::f16 : Form::f32;
        }
    }

    // Stores a lane's share, unless the row is missing. Called by the whole warp.
    template <bool whole, Form form = Form::any>
    __device__ void store(const Row &row, int column, float (&values)[2][8]) const {
        const bool stored = row.present && column < cols;
        if constexpr (form == Form::bf16) {
            out.store_of<whole, __nv_bfloat16>(row.out, column, cols - column, stored, values);
        } else if constexpr (form == Form::f16) {
            out.store_of<whole, __half>(row.out, column, cols - column, stored, values);
        } else if constexpr (form == Form::f32) {
            out.store_of<whole, float>(row.out, column, cols - column, stored, values);
        } else if constexpr (quantizes(form) && form != Form::any) {
            store_codes<form>(row, column, stored, values);
        } else if (!quantizes()) {
            out.store<whole>(row.out, column, cols - column, stored, values);
        } else if constexpr (whole) {
            if (quantized.format == EndingFormat::nvfp4) {
                tile::with_nvfp4_rule(quantized.rule, [&](auto better_of_two) {
                    store_codes<Form::nvfp4, better_of_two>(row, column, stored, values);
                });
            } else if (quantized.format == EndingFormat::mxfp4) {
                store_codes<Form::mxfp4>(row, column, stored, values);
            } else {
                store_codes<Form::mxfp8>(row, column, stored, values);
            }
        } else {
            quantized.store(row.number, column, cols, row.present, values);
        }
    }

    // Clears what SharePlaces leave of a thread's rows, first_row, first_row + step, ..., and its rows of padding. A
    // row has `lanes` lanes.
    template <Form form>
    __device__ void clear_rest(uint32_t first_row, uint32_t step, int lane, int lanes) const {
        if constexpr (quantizes(form)) {
            const tile::ScalePlaces &places = quantized.places;
            if (!places.swizzled) return;
            const uint32_t end = this->end(), blocks = places.blocks, padded = places.padded_blocks();
#pragma unroll 1
            for (uint32_t row = first_row; row < end; row += step) {
                if (row >= uint32_t(rows)) {
                    clear<form>(row, lane, lanes);
                } else {
#pragma unroll 1
                    for (uint32_t block = blocks + lane; block < padded; block += lanes)
                        quantized.scales[places.at(row, block)] = 0;
                }
            }
        }
    }

    // Clears the scales of a row of padding, with `lanes` lanes.
    template <Form form = Form::any>
    __device__ void clear(int64_t row, int lane, int lanes) const {
        if (!quantizes(form)) return;
        const tile::ScalePlaces &places = quantized.places;
        uint8_t *first = quantized.scales + places.at(row, 0);
#pragma unroll 1
        for (uint32_t block = 4 * lane; block < places.padded_blocks(); block += 4 * lanes)
            *reinterpret_cast<uint32_t *>(first + of_row(block)) = 0;
    }

    // Quantizes a lane's share. Returns the scale of its block.
    template <Form form>
    using CodesOf = tile::LaneCodes<form == Form::mxfp8 ? 8 : 4, 2>;
    template <Form form, bool better_of_two = false>
    __device__ uint32_t encode(const float (&values)[2][8], CodesOf<form> &codes) const {
        const tile::ScaleRule rule = tile::ScaleRule(quantized.rule);
        if constexpr (form == Form::mxfp8) {
            return encode_share<tile::E4m3>(values, rule, codes);
        } else if constexpr (form == Form::mxfp4) {
            return encode_mxfp4_share(values, rule, codes);
        } else {
            tile::Nvfp4Global global(quantized.global_scale);
            if constexpr (better_of_two) return encode_nvfp4_share<true>(values, global, codes);
            if (!splits) global.most = -1.0f;   // no block is plain()
            return encode_nvfp4_block(values, global, codes);
        }
    }

    template <Form form>
    static constexpr int block_of = form == Form::nvfp4 ? tile::nvfp4_block : tile::mx_block;

private:
    template <Form form>
    friend struct SharePlaces;

    template <Form form, bool better_of_two = false>
    __device__ void store_codes(const Row &row, int column, bool stored, const float (&values)[2][8]) const {
        CodesOf<form> codes;
        const uint32_t scale = encode<form, better_of_two>(values, codes);
        if (stored) put<block_of<form>>(row, column, codes, scale);
    }

    // places.at(row, 0), with less arithmetic.
    __device__ int64_t scales_of(uint32_t row) const {
        constexpr uint32_t rows = tile::scale_tile_rows, bytes = tile::scale_tile_bytes / tile::scale_tile_blocks;
        const tile::ScalePlaces &places = quantized.places;
        if (!places.swizzled) return row * places.stride;
        return row / rows * (places.padded_blocks() * bytes) + (row % 32 * 16 + row % rows / 32 * 4);
    }

    // The offset of a block's scale from the first one of its row.
    __device__ uint32_t of_row(uint32_t block) const {
        constexpr uint32_t tile_blocks = tile::scale_tile_blocks, tile_bytes = tile::scale_tile_bytes;
        return quantized.places.swizzled ? block / tile_blocks * tile_bytes + block % tile_blocks : block;
    }

    // Stores a lane's codes of a whole row. The first lane of a block stores the scale.
    template <int block, int bits>
    __device__ void put(const Row &row, int column, const tile::LaneCodes<bits, 2> &codes, uint32_t scale) const {
        uint8_t *target = row.codes + uint32_t(column) * bits / 8;
        if constexpr (bits == 4) tile::store(target, uint2{codes.word[0], codes.word[1]});
        else tile::store(target, uint4{codes.word[0], codes.word[1], codes.word[2], codes.word[3]});
        const tile::ScalePlaces &places = quantized.places;
        const uint32_t at = uint32_t(column) / block;
        if (uint32_t(column) % block == 0) row.scales[of_row(at)] = scale;
        if (!places.swizzled || places.blocks % tile::scale_tile_blocks == 0 || column + block < cols) return;
#pragma unroll 1
        for (uint32_t behind = at + 1; behind < places.padded_blocks(); ++behind) row.scales[of_row(behind)] = 0;
    }
};

// The places of a lane's two shares, `apart` columns apart, of rows that a loop goes through in steps of `step` rows,
// which take few instructions. Scales behind the last block are left to clear_rest().
template <Form form>
struct SharePlaces {
    static constexpr int bits = form == Form::mxfp8 ? 8 : 4, block = Produced::block_of<form>;
    const Produced &y;
    Produced::Row row;   // where codes and scales of the first share are
    int columns[2];
    // In bytes. Opaque, so that the compiler does not work them out for every row.
    int codes_apart, scales_apart, codes_step, scales_step;

    __device__ SharePlaces(const Produced &y, uint32_t number, uint32_t step, int column, int apart)
        : y(y), row(y.row<form>(number)), columns{column, column + apart} {
        if constexpr (Produced::quantizes(form)) {
            const uint32_t scale = y.of_row(column / block);
            row.codes += column * bits / 8, row.scales += scale;
            codes_apart = ptx::of_this_branch(apart * bits / 8);
            scales_apart = ptx::of_this_branch(int(y.of_row((column + apart) / block) - scale));
            codes_step = ptx::of_this_branch(int(step * y.quantized.code_bytes));
            scales_step =
                ptx::of_this_branch(int(y.quantized.places.swizzled ? scale : step * y.quantized.places.stride));
        }
    }

    // Stores share 0 or 1 of the row. Called by the whole warp.
    __device__ void store(int share, bool there, float (&values)[2][8]) const {
        if constexpr (Produced::quantizes(form)) {
            Produced::CodesOf<form> codes;
            const uint32_t scale = y.encode<form>(values, codes);
            if (!there || !row.present) return;
            const uint32_t (&word)[decltype(codes)::words] = codes.word;
            uint8_t *const target = row.codes + share * codes_apart;
            if constexpr (bits == 4) tile::store(target, uint2{word[0], word[1]});
            else tile::store(target, uint4{word[0], word[1], word[2], word[3]});
            if (block == produce_share || columns[0] % block == 0) row.scales[share * scales_apart] = scale;
        } else {
            y.store<true, form>(row, columns[share], values);
        }
    }

    // Moves to row `number`, a step on.
    __device__ void move(uint32_t number, uint32_t step) {
        if constexpr (Produced::quantizes(form)) {
            row.present = number < uint32_t(y.rows);
            row.codes += codes_step;
            if (y.quantized.places.swizzled) row.scales = y.quantized.scales + scales_step + y.scales_of(number);
            else row.scales += scales_step;
        } else {
            y.move<form>(row, number, step);
        }
    }
};

// Calls body(form) with the form as a compile-time constant and returns true if it is usual: quantized, or in the type
// of the input, of 16 bits.
template <class Element, class Body>
__device__ __forceinline__ bool with_usual_form(const Produced &y, Body &&body) {
    if constexpr (sizeof(Element) == 2) {
        const Form form = y.form();
        if (form == form_of<Element>) body(std::integral_constant<Form, form_of<Element>>{});
        else if (form == Form::mxfp8) body(std::integral_constant<Form, Form::mxfp8>{});
        else if (form == Form::mxfp4) body(std::integral_constant<Form, Form::mxfp4>{});
        else if (form == Form::nvfp4) body(std::integral_constant<Form, Form::nvfp4>{});
        else return false;
        return true;
    }
    return false;
}

// Parameters of entries with such outputs: the outputs, which are one of out_*[rows, cols], or codes[rows, code_bytes]
// and scales[scale_bytes], the others null; scalars; strides.
#define PRODUCED_OUTPUTS float *out_f32, __half *out_f16, __nv_bfloat16 *out_bf16, uint8_t *codes, uint8_t *scales
#define PRODUCED_SCALARS int ending, int rule, int swizzled
#define PRODUCED_STRIDES int64_t out_f32_row, int64_t out_f16_row, int64_t out_bf16_row

__device__ inline Produced produced(const OutputRows &out, uint8_t *codes, uint8_t *scales, int64_t code_bytes,
                                    const float *global, int ending, int rule, int swizzled, int64_t rows, int cols) {
    const EndingFormat format = EndingFormat(ending);
    const int64_t blocks = ceil_div(cols, format == EndingFormat::nvfp4 ? tile::nvfp4_block : tile::mx_block);
    return {TypedRows<char>(out),
            {format, codes, scales, code_bytes, {blocks, blocks, swizzled != 0}, rule, global ? *global : 1.0f},
            rows,
            cols,
            format == EndingFormat::nvfp4 && tile::SplitReciprocal::serves(global ? *global : 1.0f)};
}

// Loops over the shares of all rows, for kernels that compute a share from the same columns of their input. load(whole,
// row, column, raw) starts loading the input of a share. make(raw, row, values, taken) computes its values, and calls
// taken() once it has read `raw`: with 16-bit elements the next share is loaded there meanwhile.
template <class Element, class Raw, bool whole, Form form, class Load, class Make>
__device__ __forceinline__ void produce_shares(const Produced &target, Load &&load, Make &&make) {
    constexpr bool ahead = sizeof(Element) == 2;
    constexpr std::bool_constant<whole> is_whole;
    const uint32_t shares = 2 * ceil_div(target.cols, 2 * produce_share);   // of a row: whole blocks
    const int64_t items = target.rows * shares, step = int64_t(gridDim.x) * produce_threads;
    int64_t first = int64_t(blockIdx.x) * produce_threads;
    int64_t row = (first + threadIdx.x) / shares;
    uint32_t share = first + threadIdx.x - row * shares;
    const int64_t step_rows = step / shares;
    const uint32_t step_shares = step - step_rows * shares;
    Raw raw;
    const auto begin = [&] {
        if (row < target.rows) load(is_whole, row, share * produce_share, raw);
    };
    if (ahead) begin();
#pragma unroll 1
    for (; first < items; first += step) {
        if (!ahead) begin();
        const int64_t here = row;
        const int column = share * produce_share;
        row += step_rows, share += step_shares;
        if (share >= shares) share -= shares, ++row;
        float values[2][8];
        make(raw, here, values, [&] {
            if (ahead) begin();
        });
        target.store<whole, form>(target.row<form>(here), column, values);
    }
    if constexpr (Produced::quantizes(form)) {
#pragma unroll 1
        for (int64_t padding = target.rows + blockIdx.x; padding < target.end(); padding += gridDim.x)
            target.clear<form>(padding, threadIdx.x, produce_threads);
    }
}

// The same of whole rows. A thread has the same columns of every row that it has, so that a step takes few
// instructions. The blocks have at least the threads of a row; those behind the last row of a step have nothing to do.
template <class Element, class Raw, Form form, class Load, class Make>
__device__ __forceinline__ void produce_rows(const Produced &target, Load &&load, Make &&make) {
    const uint32_t shares = uint32_t(target.cols) / produce_share, rows = target.rows;
    const uint32_t first = blockIdx.x * produce_threads, step = gridDim.x * produce_threads / shares;
    uint32_t row = (first + threadIdx.x) / shares;
    const uint32_t column = (first + threadIdx.x - row * shares) * produce_share;
    if (row >= step) row = rows;
    Raw raw;
    const auto begin = [&](uint32_t row) {
        if (row < rows) load(std::true_type{}, row, column, raw);
    };
    begin(row);
    // Addresses of the next row follow from those of this one where registers are left for the steps.
    constexpr bool moves = sizeof(Raw) <= 32;
    auto to = target.row<form>(row);
#pragma unroll 1
    for (uint32_t of_block = first / shares; of_block < rows; of_block += step) {
        float values[2][8];
        make(raw, row, values, [&] { begin(row + step); });
        if (!moves) to = target.row<form>(row);
        target.store<true, form>(to, column, values);
        row += step;
        if (moves) target.move<form>(to, row, step);
    }
    if constexpr (Produced::quantizes(form)) {
#pragma unroll 1
        for (int64_t padding = target.rows + blockIdx.x; padding < target.end(); padding += gridDim.x)
            target.clear<form>(padding, threadIdx.x, produce_threads);
    }
}

// whole: whether all source rows are whole. usual_forms: such rows have a loop for each usual form.
template <class Element, class Raw, bool usual_forms = false, class Load, class Make>
__device__ __forceinline__ void produce_shares(const Produced &target, bool whole, Load &&load, Make &&make) {
    if (!whole || !target.is_whole()) {
        produce_shares<Element, Raw, false, Form::any>(target, load, make);
    } else {
        if constexpr (usual_forms) {
            const int64_t threads = int64_t(gridDim.x) * produce_threads;
            if (threads >= target.cols / produce_share && target.rows + 2 * threads < INT32_MAX &&
                with_usual_form<Element>(
                    target, [&](auto form) { produce_rows<Element, Raw, form>(target, load, make); }))
                return;
        }
        produce_shares<Element, Raw, true, Form::any>(target, load, make);
    }
}

}   // namespace op
