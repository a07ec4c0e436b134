// The epilogue of matrix products, applied to sums in registers: bias, activation, residual, rounding or quantization.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/alu.cuh"
#include "../ptx/control.cuh"
#include "../ptx/warp.cuh"
#include "../tile/lanes.cuh"
#include "../tile/run.cuh"
#include "../tile/staging.cuh"
#include "activation.cuh"
#include "ending.cuh"

namespace op {

// The epilogue's parameters. Missing arrays are null; a count of 1 means one number for all groups.
struct EpilogueOptions {
    FloatRows bias;       // [groups, cols]
    FloatRows residual;   // [batch, rows, width]
    OutputRows out;       // [batch, rows, width]
    int64_t residual_batch, out_batch;
    uint8_t *codes, *scales;                                  // of C [batch rows, width], if `ending` is not 0
    const float *alphas, *a_global, *b_global, *out_global;   // [alpha_count], [1], [1], [level_count]
    float alpha, limit, gate_alpha, offset;
    int activation, ending, rule, swizzled, in_place;   // in_place: `out` holds the residual
    int alpha_count, level_count, width;
    int64_t code_bytes;

    __device__ int block() const {
        return EndingFormat(ending) == EndingFormat::nvfp4 ? tile::nvfp4_block : tile::mx_block;
    }
    // The factor of the sums of a group.
    __device__ float factor(int group) const {
        const auto level = [](const float *of) { return of ? *of : 1.0f; };
        const float first = alphas ? alphas[min(group, alpha_count - 1)] : alpha;
        return first * (level(a_global) * level(b_global));
    }
    __device__ QuantizedRows quantized_rows(float global) const {
        const int64_t blocks = ceil_div(ptx::mov_b32(width), block());   // a division only if C is quantized
        return {EndingFormat(ending), codes, scales, code_bytes, {blocks, blocks, swizzled != 0}, rule, global};
    }
};

// Pads the last tile of scales behind the `rows` rows of every matrix, for the columns of C from `col` on, counted
// before the activation. Called by one whole block for all matrices, however rows are grouped.
__device__ inline void fill_scale_tiles(const EpilogueOptions &options, int rows, int col, int cols) {
    if (EndingFormat(options.ending) == EndingFormat::none) return;
    const int halves = Activation(options.activation) == Activation::swiglu, block = options.block();
    options.quantized_rows(1.0f).fill_tile(int64_t(gridDim.z) * rows, (col >> halves) / block,
                                           ((col + cols) >> halves) / block);
}

// Rows of floats of one of three types.
struct TypedRows {
    enum class Type { bf16, f16, f32 };
    uint8_t *data;    // null: there are none
    int64_t stride;   // bytes from row to row
    Type type;

    // `first`: elements from the first row on to that of a matrix.
    template <class Rows>
    __device__ TypedRows(const Rows &rows, int64_t first)
        : type(rows.bf16  ? Type::bf16
               : rows.f16 ? Type::f16
                          : Type::f32) {
        const void *const start = rows.bf16 ? rows.bf16 : rows.f16 ? static_cast<const void *>(rows.f16) : rows.f32;
        data = static_cast<uint8_t *>(const_cast<void *>(start)) + (first << log_size());
        if (!start) data = nullptr;
        stride = rows.stride << log_size();
    }

    __device__ static constexpr Type type_of(__nv_bfloat16) { return Type::bf16; }
    __device__ static constexpr Type type_of(__half) { return Type::f16; }

    __device__ bool there() const { return data; }
    __device__ int log_size() const { return type == Type::f32 ? 2 : 1; }
    __device__ uint8_t *at(int64_t row, int column) const {
        return data + row * stride + (int64_t(column) << log_size());
    }
    // Whether chunks of 16 bytes are aligned.
    __device__ bool has_chunks() const { return (reinterpret_cast<uintptr_t>(data) | stride) % 16 == 0; }

    // An element.
    __device__ float load(int64_t row, int column) const {
        const uint8_t *const source = at(row, column);
        if (type == Type::f32) return __ldg(reinterpret_cast<const float *>(source));
        const uint16_t half = __ldg(reinterpret_cast<const uint16_t *>(source));
        return type == Type::bf16 ? __uint_as_float(uint32_t(half) << 16) : __half2float(__ushort_as_half(half));
    }
    __device__ void store(int64_t row, int column, float value) const { store_at(at(row, column), type, value); }
    __device__ static void store_at(uint8_t *target, Type type, float value) {
        if (type == Type::f32) *reinterpret_cast<float *>(target) = value;
        else if (type == Type::bf16) *reinterpret_cast<__nv_bfloat16 *>(target) = __nv_bfloat16(value);
        else *reinterpret_cast<__half *>(target) = __half(value);
    }

    // Sixteen elements, in chunks: load() starts loading, add() needs them.
    struct Sixteen {
        uint4 chunk[4];
    };
    __device__ void load(Sixteen &some, int64_t row, int column) const {
        const uint4 *const source = reinterpret_cast<const uint4 *>(at(row, column));
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < 2 || type == Type::f32) some.chunk[i] = __ldg(source + i);
    }
    __device__ void add(const Sixteen &some, float (&values)[2][8]) const {
        float more[2][8];
        if (type == Type::f32) {
#pragma unroll
            for (int i = 0; i < 2; ++i) tile::Eight<float>{some.chunk[2 * i], some.chunk[2 * i + 1]}.unpack(more[i]);
        } else if (type == Type::bf16) {
            tile::unpack(some.chunk[0], more[0], __nv_bfloat16{}),
                tile::unpack(some.chunk[1], more[1], __nv_bfloat16{});
        } else {
            tile::unpack(some.chunk[0], more[0], __half{}), tile::unpack(some.chunk[1], more[1], __half{});
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) values[i / 8][i % 8] += more[i / 8][i % 8];
    }

    // Stores a lane's share, if it is `stored`. If `paired`, pairs of lanes have neighboring shares, both stored or
    // neither. Called by the whole warp.
    __device__ void store_chunks(int64_t row, int column, const float (&values)[2][8], bool stored, bool paired) const {
        uint8_t *const target = at(row, column);
        const auto in_16_bits = [&](auto element) {
            auto *const first = reinterpret_cast<decltype(element) *>(target);
            const uint4 low = tile::pack(values[0], element), high = tile::pack(values[1], element);
            if (paired) tile::store_paired(first, low, high, stored);
            else if (stored) tile::store(first, low), tile::store(first + 8, high);
        };
        if (type == Type::bf16) in_16_bits(__nv_bfloat16{});
        else if (type == Type::f16) in_16_bits(__half{});
        else if (stored) store_share(reinterpret_cast<float *>(target), 16, values);
    }
};

// Fetches the residual's rows from `row` to end_row - 1 into the L2, in `cols` columns from `col` on, counted before
// the activation. Called by a whole warp.
__device__ inline void prefetch_residual(const EpilogueOptions &options, int matrix, int row, int end_row, int col,
                                         int cols) {
    const TypedRows residual = options.in_place ? TypedRows(options.out, ptx::mov_b32(matrix) * options.out_batch)
                                                : TypedRows(options.residual, matrix * options.residual_batch);
    const int gated = Activation(options.activation) == Activation::swiglu, first = col >> gated;
    if (!residual.there() || first >= options.width) return;
    constexpr int line = 128;
#pragma unroll 1
    for (int here = row + tile::lane_item(0); here < end_row; here += 32)
#pragma unroll 1
        for (int byte = 0; byte < (cols >> gated) << residual.log_size(); byte += line)
            ptx::prefetch_global_l2(residual.at(here, min(first + (byte >> residual.log_size()), options.width - 1)));
}

// The epilogue of one matrix of C. A lane has a share of a row at a time; a gated share has twice the columns.
struct Epilogue {
    TypedRows bias, residual, out;
    QuantizedRows quantized = {};   // its format is none if C is not quantized
    Activation activation;
    Gate gate;
    float alpha;
    int64_t first_row;   // of this matrix among all rows of C
    int cols, width, bias_row;

    __device__ Epilogue(const EpilogueOptions &options, int matrix, int group, int rows, int cols)
        : bias(options.bias, 0), residual(options.residual, matrix * options.residual_batch),
          out(options.out, matrix * options.out_batch), activation(Activation(options.activation)),
          gate{options.limit, options.gate_alpha, options.offset}, first_row(int64_t(matrix) * rows), cols(cols),
          width(options.width), bias_row(group) {
        if (options.in_place) residual = out;
        alpha = options.factor(group);
        if (EndingFormat(options.ending) == EndingFormat::none) return;
        quantized = options.quantized_rows(
            options.out_global ? options.out_global[min(ptx::mov_b32(group), options.level_count - 1)] : 1.0f);
    }

    // The bias of a lane's share, for the columns of the staging from `col` on: -0, which changes no sum, if there is
    // none. Every pass of a lane has the same columns. Called by the whole warp.
    struct LaneBias {
        float values[2][2][8];
    };
    template <class Staging>
    __device__ LaneBias lane_bias(int col) const {
        LaneBias result;
#pragma unroll
        for (int i = 0; i < 32; ++i) result.values[i / 16][i / 8 % 2][i % 8] = -0.0f;
        if (!bias.there()) return result;
        // A lane loads one value of each run of `run` values of a share; the lanes of a share take it from there.
        constexpr int shares = Staging::row_shares, run = 32 / shares;
        float mine[tile::share_columns / run];
#pragma unroll
        for (int i = 0; i < tile::share_columns / run; ++i) {
            const int column =
                col + tile::lane_item(0) % shares * tile::share_columns + tile::lane_item(0) / shares + i * run;
            mine[i] = column < cols ? bias.load(bias_row, column) : 0.0f;
        }
        const int gated = activation == Activation::swiglu, share = (tile::lane_item(0) << gated) % shares;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half > gated) break;
#pragma unroll
            for (int i = 0; i < 16; ++i)
                result.values[half][i / 8][i % 8] = __uint_as_float(
                    ptx::shfl_sync_idx_b32(__float_as_uint(mine[i / run]), i % run * shares + share + half));
        }
        return result;
    }

    // The bias of this lane's accumulators of `tiles` column tiles from `col` on, as above. Called by the whole warp.
    template <int tiles>
    __device__ void accumulator_bias(int col, float (&result)[tiles][2]) const {
#pragma unroll
        for (int i = 0; i < 2 * tiles; ++i) result[i / 2][i % 2] = -0.0f;
        if (!bias.there()) return;
        float mine[tiles / 4];   // a lane loads every 32nd column
#pragma unroll
        for (int i = 0; i < tiles / 4; ++i) {
            const int column = col + 32 * i + tile::lane_item(0);
            mine[i] = column < cols ? bias.load(bias_row, column) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 2 * tiles; ++i)
            result[i / 2][i % 2] = __uint_as_float(ptx::shfl_sync_idx_b32(
                __float_as_uint(mine[i / 8]), i / 2 % 4 * tile::mma_columns + tile::accumulator_column(i % 2)));
    }

    // alpha times the sums plus the bias of columns from `col` on, and the activation, unless it is gated. Called by
    // the whole warp.
    template <int slices, int tiles>
    __device__ void activate_sums(tile::Accumulator (&sums)[slices][tiles], int col) const {
        float of_column[tiles][2];
        accumulator_bias(col, of_column);
#pragma unroll
        for (int i = 0; i < slices * tiles * 4; ++i) {
            float &sum = sums[i / 4 / tiles][i / 4 % tiles][i % 4];
            sum = fmaf(sum, alpha, of_column[i / 4 % tiles][i % 2]);
        }
        if (activation == Activation::none || activation == Activation::swiglu) return;
        // One copy of the code for 16 sums: all sums move on, so that indices stay constants.
        constexpr int some = 4, parts = slices * tiles / some;
        tile::Accumulator(&all)[slices * tiles] = reinterpret_cast<tile::Accumulator(&)[slices * tiles]>(sums);
#pragma unroll 1
        for (int part = 0; part < parts; ++part) {
            float values[2][8];
#pragma unroll
            for (int i = 0; i < 16; ++i) values[i / 8][i % 8] = all[i / 4][i % 4];
            activate(values, activation);
#pragma unroll
            for (int i = 0; i < 4 * (slices * tiles - some); ++i) all[i / 4][i % 4] = all[i / 4 + some][i % 4];
#pragma unroll
            for (int i = 0; i < 16; ++i) all[slices * tiles - some + i / 4][i % 4] = values[i / 8][i % 8];
        }
    }

    // Whether store_rows() can store rows of C in the `columns` columns from `col` on.
    template <class Element>
    __device__ bool stores_rows(int col, int columns, Element) const {
        constexpr auto type = TypedRows::type_of(Element{});
        const auto suits = [&](const TypedRows &rows) { return rows.type == type && rows.has_chunks(); };
        return quantized.format == EndingFormat::none && activation != Activation::swiglu && out.there() &&
               suits(out) && (!residual.there() || suits(residual)) && (col + columns <= width || width % 8 == 0);
    }

    // Stores rows of finished sums, those before end_row, plus the residual, in whole chunks of 16 bits; `staging` is
    // this warp's memory. Called by the whole warp.
    template <int staged, int slices, int tiles, class Element>
    __device__ void store_rows(tile::PairStaging<8 * tiles> (&staging)[staged],
                               tile::Accumulator (&sums)[slices][tiles], int row, int end_row, int col, Element) const {
        using Staging = tile::PairStaging<8 * tiles>;
        const int column = col + Staging::column(), first_row = row + Staging::row(0);
        const int left = column < width ? end_row - first_row : 0;   // rows of this lane, behind its first one
        // Calls body(pass, address, whether it exists) for each chunk of this lane in a slice.
        const auto for_chunks = [&](const TypedRows &rows, int slice, auto &&body) {
            uint8_t *const first = rows.at(first_row, column);
#pragma unroll
            for (int pass = 0; pass < Staging::passes; ++pass) {
                const int here = 16 * slice + pass * Staging::pass_rows;
                body(pass, first + here * rows.stride, here < left);
            }
        };
#pragma unroll
        for (int first = 0; first < slices; first += staged) {
            ptx::bar_warp_sync();   // all lanes have read the old contents
            if (residual.there()) {
#pragma unroll
                for (int i = 0; i < staged; ++i)
                    for_chunks(residual, first + i, [&](int pass, const uint8_t *source, bool present) {
                        staging[i].copy(pass, source, present);
                    });
                ptx::cp_async_commit_group();
                ptx::cp_async_wait_group<0>();
                ptx::bar_warp_sync();   // all lanes see the residual
#pragma unroll
                for (int i = 0; i < staged; ++i) staging[i].add_to(sums[first + i], Element{});
                ptx::bar_warp_sync();   // all lanes have read it
            }
#pragma unroll
            for (int i = 0; i < staged; ++i) staging[i].put(sums[first + i], Element{});
            ptx::bar_warp_sync();   // all lanes see the rows
#pragma unroll
            for (int i = 0; i < staged; ++i) {
                uint4 chunk[Staging::passes];
#pragma unroll
                for (int pass = 0; pass < Staging::passes; ++pass) chunk[pass] = staging[i].get(pass);
                for_chunks(out, first + i, [&](int pass, uint8_t *target, bool present) {
                    if (present) *reinterpret_cast<uint4 *>(target) = chunk[pass];
                });
            }
        }
    }

    // Finishes 16 rows of sums from `row` on, those before end_row, with the columns of the staging from `col` on: pass
    // `turn` of every `turns`, if warps share them. activated: the sums are those of activate_sums(). Called by the
    // whole warp.
    template <bool activated = false, class Staging>
    __device__ void finish(Staging &staging, int row, int end_row, int col, const LaneBias &lane_bias, int turn = 0,
                           int turns = 1) const {
        constexpr int shares = Staging::row_shares;
        static_assert(shares == 2 || shares == 4);
        const int gated = activation == Activation::swiglu, log_shares = (shares == 4 ? 2 : 1) - gated;
        const int share_row = tile::lane_item(0) >> log_shares, step = 32 >> log_shares;
        const int share_column = (tile::lane_item(0) << gated) % shares * tile::share_columns;
        const int column = (col + share_column) >> gated, end_column = (col + Staging::columns) >> gated;
        // Whether each share is stored as a whole, or not at all, with its neighbor. A row that has a single share, of
        // a gate, has no neighbors.
        const bool in_pairs = end_column <= width || width % 32 == 0;
        // What all passes share is opaque to the compiler, which would compute it anew in each.
        const bool adds = residual.there(), adds_chunks = ptx::mov_b32(adds && in_pairs && residual.has_chunks());
        const bool stores_chunks = ptx::mov_b32(out.there() && in_pairs && out.has_chunks());
        const bool activates = !activated && ptx::mov_b32(!gated && activation != Activation::none);
        const int first_place = ptx::mov_b32(Staging::place(min(share_row, 15), share_column));
#pragma unroll 1
        for (int first = turn * step; first < 16; first += turns * step) {
            const int place = first_place + first * Staging::columns, row_here = row + first + share_row;
            const bool present = first + share_row < 16 && row_here < end_row, stored = present && column < width;
            TypedRows::Sixteen more;
            if (adds_chunks && stored) residual.load(more, row_here, column);
            // This lane's share, with bias and activation.
            float values[2][8];
            staging.get_at(place, values);
            if constexpr (!activated) add_bias(lane_bias.values[0], values);
            if (gated) {
                float right[2][8];
                staging.get_at(place ^ Staging::place(0, tile::share_columns), right);
                if constexpr (!activated) add_bias(lane_bias.values[1], right);
#pragma unroll
                for (int i = 0; i < 8; ++i) values[0][i] = gate(values[i / 4][i % 4 * 2], values[i / 4][i % 4 * 2 + 1]);
#pragma unroll
                for (int i = 0; i < 8; ++i) values[1][i] = gate(right[i / 4][i % 4 * 2], right[i / 4][i % 4 * 2 + 1]);
            }
            if (activates) activate(values, activation);
            // Where shares have ends or no chunks, element by element, by way of the staging.
            const auto each_element = [&](auto &&body) {
                ptx::bar_warp_sync();                                // all lanes have read their shares
                if (share_row < 16) staging.set_at(place, values);   // other lanes have the place of row 15
                ptx::bar_warp_sync();                                // all lanes see the values
                const int log_columns = log_shares + 4;
#pragma unroll 1
                for (int i = tile::lane_item(0); i < min(step, 16) << log_columns; i += 32) {
                    const int element_row = first + (i >> log_columns), here = i & ((1 << log_columns) - 1);
                    const int at = staging.place(element_row, here + (gated ? here / 16 * 16 : 0));
                    const int element_column = (col >> gated) + here;
                    if (row + element_row < end_row && element_column < width)
                        body(staging.words[at], row + element_row, element_column);
                }
            };
            // The residual.
            if (adds_chunks) {
                if (stored) residual.add(more, values);
            } else if (adds) {
                each_element([&](float &value, int row, int column) { value += residual.load(row, column); });
                ptx::bar_warp_sync();   // all lanes see the sums
                staging.get_at(place, values);
            }
            // The output.
            if (stores_chunks) out.store_chunks(row_here, column, values, stored, shares > 2 || !gated);
            else if (out.there())
                each_element([&](float value, int row, int column) { out.store(row, column, value); });
            if (quantized.format != EndingFormat::none) {
                QuantizedRows rows = quantized;
                rows.global_scale = ptx::mov_b32(rows.global_scale);
                rows.store(first_row + row_here, ptx::mov_b32(column), width, present, values);
            }
        }
    }

private:
    // alpha times the sums, plus the bias.
    __device__ void add_bias(const float (&bias_here)[2][8], float (&values)[2][8]) const {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float &value = values[i / 8][i % 8];
            value = fmaf(value, alpha, bias_here[i / 8][i % 8]);
        }
    }
};

}   // namespace op
