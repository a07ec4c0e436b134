// Rows divided by their root mean square, or by their standard deviation about their mean.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../ptx/access.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/math.cuh"
#include "../ptx/roots.cuh"
#include "../ptx/warp.cuh"
#include "early.cuh"
#include "moments.cuh"
#include "produce.cuh"

namespace op {

static_assert(norm_threads == produce_threads && norm_columns == produce_share);

// The input: x, or x + residual, which is written to `total`.
template <class Element>
struct NormInput {
    const Element *x, *residual;   // [rows, cols]; residual may be null
    Element *total;                // [rows, cols] or null
    int64_t x_stride, residual_stride, total_stride;

    __device__ bool is_whole(int cols) const {
        return is_whole_rows(x, x_stride, cols) && (!residual || is_whole_rows(residual, residual_stride, cols)) &&
               (!total || is_whole_rows(total, total_stride, cols));
    }
};

// Missing weight[cols] and bias[cols] are 1 and 0. rounds: the sum with the residual and the factor of the weight are
// rounded to x's type.
struct NormOptions {
    FloatRows weight, bias;
    float eps, offset;
    bool centered, rounds;
};

// Shared memory in which each thread keeps 128 bytes of rows for itself. Chunks of 16 bytes have a stride of a block of
// threads, so that banks do not conflict.
struct KeptRows {
    static constexpr int chunks = 8;
    uint4 chunk[chunks][produce_threads];

    // How many shares fit, and the first chunk of one.
    template <class Kept>
    static constexpr int shares = chunks / sizeof(Kept);
    template <class Kept>
    __device__ uint4 &of(int share) {
        return chunk[share * sizeof(Kept)][threadIdx.x];
    }

    // Starts copying a lane's share, through the L1: the next instruction finds the other half of each sector there.
    template <class Kept>
    __device__ void begin(int share, const Kept *source) {
        const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(&of<Kept>(share)));
        const char *from = reinterpret_cast<const char *>(source);
#pragma unroll
        for (int i = 0; i < int(sizeof(Kept)); ++i)
            ptx::cp_async_ca<16>(target + i * sizeof(chunk[0]), from + i * sizeof(uint4), 16);
    }

    // Zeros for a lane's shares past the end of a row, of `count`: they stay.
    template <class Kept>
    __device__ void clear_behind(const NormLanes &place, int count, int cols) {
        const float zeros[2][8] = {};
#pragma unroll 1
        for (int share = 0; share < count; ++share)
            if (place.column(share) >= cols) put<Kept>(share, zeros);
    }

    // Starts copying eight values of a whole row of weights to one or two chunks, and gives them.
    __device__ void begin_eight(int at, const TypedRows<const char> &rows, int column) {
        const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(&chunk[at][threadIdx.x]));
        const char *source = rows.first + rows.bytes(column);
        if (rows.type) ptx::cp_async_ca<16>(target, source, 16);
        if (rows.type == rows.f32) ptx::cp_async_ca<16>(target + sizeof(chunk[0]), source + sizeof(uint4), 16);
    }
    __device__ void get_eight(int at, const TypedRows<const char> &rows, float (&values)[8]) const {
        const auto get = [&](auto element) {
            tile::Eight<decltype(element)> eight;
#pragma unroll
            for (int i = 0; i < eight.chunks; ++i) eight.chunk[i] = chunk[at + i][threadIdx.x];
            eight.unpack(values);
        };
        if (rows.type == rows.bf16) get(__nv_bfloat16{});
        else if (rows.type == rows.f16) get(__half{});
        else get(float{});
    }

    template <class Kept>
    __device__ void put(int share, const float (&values)[2][8]) {
        RowShares<Kept, 1> packed;
        packed.pack(0, values);
        packed.put(&of<Kept>(share), produce_threads);
    }
    template <class Kept>
    __device__ void get(int share, float (&values)[2][8]) {
        RowShares<Kept, 1> packed;
        packed.get(&of<Kept>(share), produce_threads);
        packed.unpack(0, values);
    }
};

struct NormRowsShared {
    NormShared sums;
    KeptRows kept;
};

// The same with the biases of a thread's shares, which take the half of `kept` that a row of 16-bit elements leaves,
// and as much again.
struct NormHeldShared : NormRowsShared {
    static constexpr int first = KeptRows::chunks / 2;
    uint4 more[KeptRows::chunks / 2][produce_threads];

    __device__ uint4 &term(int i) {
        return i < first ? kept.chunk[first + i][threadIdx.x] : more[i - first][threadIdx.x];
    }
    __device__ void put_terms(int share, const float (&values)[2][8]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float four[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) four[j] = values[i / 2][i % 2 * 4 + j];
            term(4 * share + i) = tile::pack(four, float{});
        }
    }
    __device__ void get_terms(int share, float (&values)[2][8]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float four[4];
            tile::unpack(term(4 * share + i), four, float{});
#pragma unroll
            for (int j = 0; j < 4; ++j) values[i / 2][i % 2 * 4 + j] = four[j];
        }
    }
};

// Quotients by the number of columns. A product with the reciprocal of a power of two is the quotient.
struct ColumnCount {
    float count, reciprocal;   // the reciprocal is 0 unless the count is a power of two

    __device__ explicit ColumnCount(int cols)
        : count(cols), reciprocal((cols & (cols - 1)) == 0 ? 1.0f / count : 0.0f) {}
    __device__ float share(float sum) const { return reciprocal != 0.0f ? sum * reciprocal : sum / count; }
};

// 1 / sqrtf(x), both correctly rounded. Corrected approximations, of x times an even power of two where x is very small
// or large; for zeros and infinities the approximation.
__device__ inline float inverse_root(float x) {
    const auto corrected = [](float x, float approx) {
        float root = x * approx;
        root = fmaf(fmaf(-root, root, x), 0.5f * approx, root);
        const float inverse = ptx::rcp_approx_ftz_f32(root);
        return fmaf(inverse, -fmaf(inverse, root, -1.0f), inverse);
    };
    if (x >= 0x1p-60f && x <= 0x1p60f) return corrected(x, ptx::rsqrt_approx_ftz_f32(x));
    const bool small = x < 0x1p-60f;
    const float scaled = x * (small ? 0x1p80f : 0x1p-80f), approx = ptx::rsqrt_approx_ftz_f32(scaled);
    return scaled > 0.0f && scaled < INFINITY ? corrected(scaled, approx) * (small ? 0x1p40f : 0x1p-40f) : approx;
}

// row_sums() in fewer instructions, by way of one of two buffers: the calls before and after it use the other one.
struct HeldSums {
    NormShared &shared;
    const NormLanes &place;
    int put, get;   // bytes from a buffer's begin; opaque, so that the compiler keeps them in registers

    __device__ HeldSums(NormShared &shared, const NormLanes &place) : shared(shared), place(place) {
        static_assert(sizeof(shared.of_warp) == 2 * bytes && norm_threads == 8 * 32);
        put = ptx::of_this_branch(int(threadIdx.x % 32 * row + threadIdx.x / 32 * sizeof(float)));
        get = ptx::of_this_branch(int(threadIdx.x % 2 * row));
    }

    // If there are two numbers, even lanes add the first and odd lanes the second.
    template <bool both>
    __device__ float2 operator()(int buffer, float2 sums) const {
        const bool second = both && threadIdx.x % 2;
        float sum = second ? sums.y : sums.x;
        sum += ptx::shfl_sync_bfly_f32(both && !second ? sums.y : sums.x, 1);
        if (place.lanes < 32) {
#pragma unroll
            for (int mask = 2; mask < 16; mask *= 2)
                if (mask < place.lanes) sum += ptx::shfl_sync_bfly_f32(sum, mask);
        } else {
#pragma unroll
            for (int mask = 2; mask < 32; mask *= 2) sum += ptx::shfl_sync_bfly_f32(sum, mask);
            if (place.lanes > 32) {
                char *const of_warp = reinterpret_cast<char *>(shared.of_warp) + buffer * bytes;
                if (put < 2 * row) *reinterpret_cast<float *>(of_warp + put) = sum;
                ptx::bar_sync();   // all threads see the sums of every warp and have read those of two calls ago
                const auto pairs = [&](int first) {
                    const float4 four = reinterpret_cast<const float4 *>(of_warp + get)[first];
                    return float2{four.x + four.y, four.z + four.w};
                };
                const float2 low = pairs(0), high = pairs(1);
                if (place.lanes == 256) {
                    sum = (low.x + low.y) + (high.x + high.y);
                } else {
                    const int warp = threadIdx.x / 32;
                    const float2 near = warp & 4 ? high : low;
                    sum = place.lanes == 128 ? near.x + near.y : warp & 2 ? near.y : near.x;
                }
            }
        }
        if (!both) return {sum, 0.0f};
        const float other = ptx::shfl_sync_bfly_f32(sum, 1);
        return {second ? other : sum, second ? sum : other};
    }

private:
    static constexpr int row = 8 * sizeof(float), bytes = 2 * row;   // of the warps' sums of one number; of a buffer
};

// The moments of a held row, from the same sums as row_moments(). Shares past the end of a row are zeros, which change
// no sum. With `centered` values become their differences from the mean.
template <bool centered>
__device__ inline RowMoments held_moments(const HeldSums &held_sums, int &turn, const NormLanes &place,
                                          const ColumnCount &columns, const bool (&there)[norm_shares], float eps,
                                          float (&values)[norm_shares][2][8]) {
    const auto each = [&](auto &&take) {
#pragma unroll
        for (int i = 0; i < norm_shares; ++i)
#pragma unroll
            for (int j = 0; j < 16; ++j) take(values[i][j / 8][j % 8], i, j / 8);
    };
    RowMoments row = {0.0f, 0.0f};
    float squares, of_half[2] = {};
    if constexpr (centered) {
        each([&](float value, int, int half) { of_half[half] += value; });
        row.mean = columns.share(held_sums.template operator()<false>(0, {of_half[0] + of_half[1], 0.0f}).x);
        float mean[norm_shares];
        float2 sum = {};
#pragma unroll
        for (int i = 0; i < norm_shares; ++i) mean[i] = there[i] ? row.mean : 0.0f;
        each([&](float &value, int share, int) {
            value -= mean[share];
            sum.x += value;
            sum.y = fmaf(value, value, sum.y);
        });
        sum = held_sums.template operator()<true>(1, sum);
        row.rest = columns.share(sum.x);
        squares = columns.share(sum.y) - row.rest * row.rest;
    } else {
        each([&](float value, int, int half) { of_half[half] = fmaf(value, value, of_half[half]); });
        turn ^= 1;
        squares = columns.share(held_sums.template operator()<false>(turn, {of_half[0] + of_half[1], 0.0f}).x);
    }
    row.factor = inverse_root(squares + eps);
    return row;
}

// The output of a share. Options are branches around all values.
template <bool whole, class Element>
__device__ inline void norm_share(const RowMoments &row, const NormOptions &options,
                                  const TypedRows<const char> &weight, const TypedRows<const char> &bias, int column,
                                  int left, float (&values)[2][8]) {
    float more[2][8] = {};
    const auto each = [&values](auto &&change) {
#pragma unroll
        for (int i = 0; i < 16; ++i) change(values[i / 8][i % 8], i);
    };
    if (options.centered) each([&](float &value, int) { value = (value - row.mean - row.rest) * row.factor; });
    else each([&](float &value, int) { value *= row.factor; });
    if (options.rounds) round_values<Element>(values);
    if (weight.type) {
        weight.load<whole>(column, left, more);
        each([&](float &value, int i) { value *= more[i / 8][i % 8] + options.offset; });
    }
    if (bias.type) {
        bias.load<whole>(column, left, more);
        each([&](float &value, int i) { value += more[i / 8][i % 8]; });
    }
}

// y[rows, cols] = (v - m) / sqrt(s + eps) (weight + offset) + bias, where v is x or x + residual, m is the mean of v if
// `centered`, else 0, and s is the mean square of v - m. Called by whole blocks of `produce_threads`. whole: everything
// is_whole(), and a whole row fits. A row is kept in shared memory as floats. Every pass loads again what does not fit.
template <class Element, bool whole>
__device__ __forceinline__ void norm_sums(NormRowsShared &shared, const NormInput<Element> &input,
                                          const NormOptions &options, const Produced &y) {
    KeptRows &kept = shared.kept;
    const NormLanes place(y.cols);
    const int cols = y.cols, step = place.lanes * produce_share, column_0 = place.column(0);
    const int here = whole ? place.shares : min(place.shares, KeptRows::shares<float>);   // shares that are kept
    const int64_t end = y.end(), blocks_rows = int64_t(gridDim.x) * place.rows();
    const TypedRows<const char> weight(options.weight), bias(options.bias);
    // Loads a share: x, or x + residual.
    const auto load = [&](int64_t row, int column, float (&values)[2][8]) {
        RowShares<Element, 1> of_x;
        of_x.template load<whole>(input.x + row * input.x_stride, column, 0, cols);
        of_x.unpack(0, values);
        if (!input.residual) return;
        RowShares<Element, 1> of_residual;
        float other[2][8];
        of_residual.template load<whole>(input.residual + row * input.residual_stride, column, 0, cols);
        of_residual.unpack(0, other);
#pragma unroll
        for (int i = 0; i < 16; ++i) values[i / 8][i % 8] += other[i / 8][i % 8];
        if (options.rounds) round_values<Element>(values);
    };
    kept.clear_behind<float>(place, here, cols);
    int turn = 0;
#pragma unroll 1
    for (int64_t first = int64_t(blockIdx.x) * place.rows(); first < end; first += blocks_rows) {
        const int64_t row = first + place.row(), source = y.present(row);
#pragma unroll 1
        for (int i = 0, column = column_0; i < here && column < cols; ++i, column += step) {
            float values[2][8];
            load(source, column, values);
            kept.put<float>(i, values);
        }
        const auto get = [&](int share, int column, float (&values)[2][8]) {
            if (whole || share < here) kept.get<float>(share, values);
            else load(source, column, values);
        };
        const RowMoments moments =
            row_moments<whole>(shared.sums, turn, place, cols, options.centered, options.eps, [&](auto &&add) {
#pragma unroll 1
                for (int share = 0, column = column_0; share < place.shares && column < cols; ++share, column += step) {
                    float values[2][8];
                    get(share, column, values);
                    add(column, values);
                }
            });
        const auto target = y.row(row);
#pragma unroll 1
        for (int share = 0, column = column_0; share < place.shares; ++share, column += step) {
            float values[2][8];
            const int left = cols - column, at = left > 0 ? column : 0;   // past the end, any share
            get(share, at, values);
            if (input.total && row < y.rows && left > 0)
                store_values<whole>(input.total + row * input.total_stride + column, left, values);
            norm_share<whole, Element>(moments, options, weight, bias, at, left, values);
            y.store<whole>(target, column, values);
        }
        if (row >= y.rows && row < end) y.clear(row, place.lane(), place.lanes);
    }
}

// The two cases of options that most calls are: weights of x's type alone, or all that layernorm takes.
enum class UsualNorm { any, scaled, centered };

template <class Element>
__device__ inline UsualNorm usual_norm(const NormOptions &options, const TypedRows<const char> &weight,
                                       const TypedRows<const char> &bias) {
    if (options.rounds || !weight.template holds<Element>()) return UsualNorm::any;
    if (options.centered) return bias.template holds<Element>() ? UsualNorm::centered : UsualNorm::any;
    return bias.type == bias.none ? UsualNorm::scaled : UsualNorm::any;
}

// The output of a share in these cases, without a branch. The compiler fuses the last product and sum.
template <class Element, bool centered>
__device__ inline void norm_usual_share(const RowMoments &row, float offset, const TypedRows<const char> &weight,
                                        const TypedRows<const char> &bias, int column, float (&values)[2][8]) {
    float factors[2][8], terms[2][8];
    weight.template load_of<true, Element>(column, produce_share, factors);
    if (centered) bias.template load_of<true, Element>(column, produce_share, terms);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        float &value = values[i / 8][i % 8];
        value = (centered ? value - row.mean - row.rest : value) * row.factor;
        value *= factors[i / 8][i % 8] + offset;
        if (centered) value += terms[i / 8][i % 8];
    }
}

// What held rows need of the weights, in floats: factors in registers, biases in shared memory, where they take no
// registers. Each thread has those of its own shares.
struct HeldWeights {
    float factors[norm_shares][2][8];   // weight + offset
    bool fuses;                         // the last product and sum; see norm_usual_share()
};

// Whether rows and their weights are held: the usual forms of x alone, without roundings, of whole rows whose lanes
// have at most `norm_shares` shares.
template <class Element>
__device__ inline bool is_held(const NormOptions &options, const TypedRows<const char> &bias, const NormLanes &place) {
    return place.shares <= norm_shares && !options.rounds && (options.centered || bias.type == bias.none);
}

// Starts copying a lane's shares of a row, `apart` columns apart, to shared memory. there: whether it has them.
template <class Element>
__device__ inline void begin_held(KeptRows &kept, int apart, const bool (&there)[norm_shares], const Element *source) {
#pragma unroll
    for (int i = 0; i < norm_shares; ++i)
        if (there[i]) kept.begin(i, source + i * apart);
}

// Norms of held rows. While a row is in registers, the next one is copied to shared memory. Shares past the end of a
// row are zeros there.
template <class Element, bool centered, Form form>
__device__ __forceinline__ void norm_held(NormHeldShared &shared, const NormInput<Element> &input,
                                          const NormOptions &options, const HeldWeights &weights, const Produced &y,
                                          const NormLanes &place) {
    const ColumnCount columns(y.cols);
    const uint32_t rows = y.rows, step = gridDim.x * place.rows(), first_row = blockIdx.x * place.rows() + place.row();
    const bool there[norm_shares] = {place.column(0) < y.cols, place.column(1) < y.cols};
    const HeldSums sums(shared.sums, place);
    // Opaque, so that the compiler does not work them out for every row.
    const int source_step = ptx::of_this_branch(int(step * input.x_stride)),
              apart = ptx::of_this_branch(place.lanes * produce_share);
    const Element *source = input.x + first_row * input.x_stride + place.column(0);
    SharePlaces<form> target(y, first_row, step, place.column(0), place.lanes * produce_share);
    uint32_t row = first_row;
    int turn = 0;
#pragma unroll 1
    for (uint32_t of_block = blockIdx.x * place.rows(); of_block < rows; of_block += step) {
        ptx::cp_async_wait_group<0>();
        float values[norm_shares][2][8];
#pragma unroll
        for (int i = 0; i < norm_shares; ++i) shared.kept.get<Element>(i, values[i]);
        source += source_step, row += step;
        if (row < rows) begin_held(shared.kept, apart, there, source);
        ptx::cp_async_commit_group();
        const RowMoments moments = held_moments<centered>(sums, turn, place, columns, there, options.eps, values);
#pragma unroll
        for (int i = 0; i < norm_shares; ++i) {
            const auto each = [&](auto &&change) {
#pragma unroll
                for (int j = 0; j < 16; ++j) change(values[i][j / 8][j % 8], weights.factors[i][j / 8][j % 8], j);
            };
            if constexpr (centered) {
                float terms[2][8];
                shared.get_terms(i, terms);
                each([&](float &value, float, int) { value = (value - moments.rest) * moments.factor; });
                if (weights.fuses)
                    each([&](float &value, float factor, int j) { value = fmaf(value, factor, terms[j / 8][j % 8]); });
                else
                    each([&](float &value, float factor, int j) {
                        value = __fadd_rn(__fmul_rn(value, factor), terms[j / 8][j % 8]);
                    });
            } else {
                each([&](float &value, float factor, int) { value = value * moments.factor * factor; });
            }
            target.store(i, there[i], values[i]);
        }
        target.move(row, step);
    }
    y.clear_rest<form>(first_row, step, place.lane(), place.lanes);
}

// Loads the weights and calls norm_held() for the form of y. False if it is not a usual one.
template <class Element>
__device__ __forceinline__ bool norm_held(NormHeldShared &shared, const NormInput<Element> &input,
                                          const NormOptions &options, const TypedRows<const char> &weight,
                                          const TypedRows<const char> &bias, const Produced &y,
                                          const NormLanes &place) {
    const bool many = y.end() + int64_t(gridDim.x) * produce_threads > INT32_MAX;   // rows, for numbers of 32 bits
    const int64_t step = gridDim.x * place.rows();
    const auto is_int = [](int64_t number) { return number == int(number); };
    if (many || !is_int(step * input.x_stride) || !is_int(step * y.quantized.code_bytes) ||
        (!y.quantizes() && !y.out.template holds<Element>()) || y.form() == Form::any)
        return false;
    const uint32_t row = blockIdx.x * place.rows() + place.row();
    const bool there[norm_shares] = {row < y.rows && place.column(0) < y.cols,
                                     row < y.rows && place.column(1) < y.cols};
    const float zeros[2][8] = {};
#pragma unroll
    for (int i = 0; i < norm_shares; ++i)
        if (!there[i]) shared.kept.put<Element>(i, zeros);
    begin_held(shared.kept, place.lanes * produce_share, there, input.x + row * input.x_stride + place.column(0));
    ptx::cp_async_commit_group();
    HeldWeights weights;
    weights.fuses = usual_norm<Element>(options, weight, bias) == UsualNorm::centered;
#pragma unroll
    for (int i = 0; i < norm_shares; ++i) {
        const int column = place.column(i) < y.cols ? place.column(i) : 0;   // past the end, any share
        // Products with 1 and sums with -0 change no bit.
        float (&factors)[2][8] = weights.factors[i], terms[2][8];
#pragma unroll
        for (int j = 0; j < 16; ++j) factors[j / 8][j % 8] = 1.0f, terms[j / 8][j % 8] = -0.0f;
        if (weight.type) {
            weight.load<true>(column, produce_share, factors);
#pragma unroll
            for (int j = 0; j < 16; ++j) factors[j / 8][j % 8] += options.offset;
        }
        if (options.centered) {
            if (bias.type) bias.load<true>(column, produce_share, terms);
            shared.put_terms(i, terms);
        }
    }
    with_usual_form<Element>(y, [&](auto form) {
        if (options.centered) norm_held<Element, true, form>(shared, input, options, weights, y, place);
        else norm_held<Element, false, form>(shared, input, options, weights, y, place);
    });
    return true;
}

// Norms of x alone, of whole rows that fit. A row is kept in shared memory as loaded. The output takes a share from
// there for the last time and starts copying the same share of the next row to its place.
template <class Element>
__device__ __forceinline__ void norm_copies(NormHeldShared &shared, const NormInput<Element> &input,
                                            const NormOptions &options, const Produced &y) {
    KeptRows &kept = shared.kept;
    const NormLanes place(y.cols);
    const int cols = y.cols, step = place.lanes * produce_share, column_0 = place.column(0);
    const int64_t end = y.end(), blocks_rows = int64_t(gridDim.x) * place.rows();
    const TypedRows<const char> weight(options.weight), bias(options.bias);
    const bool fuses = usual_norm<Element>(options, weight, bias) == UsualNorm::centered;
    const auto source = [&](int64_t row) { return input.x + y.present(row) * input.x_stride; };
    kept.clear_behind<Element>(place, place.shares, cols);
    int64_t first = int64_t(blockIdx.x) * place.rows();
    {
        const Element *row = source(first + place.row());
#pragma unroll 1
        for (int share = 0, column = column_0; share < place.shares && column < cols; ++share, column += step)
            kept.begin(share, row + column);
    }
    int turn = 0;
#pragma unroll 1
    for (; first < end; first += blocks_rows) {
        const int64_t row = first + place.row();
        ptx::cp_async_commit_group();
        ptx::cp_async_wait_group<0>();
        const RowMoments moments =
            row_moments<true>(shared.sums, turn, place, cols, options.centered, options.eps, [&](auto &&add) {
#pragma unroll 1
                for (int share = 0, column = column_0; share < place.shares && column < cols; ++share, column += step) {
                    float values[2][8];
                    kept.get<Element>(share, values);
                    add(column, values);
                }
            });
        const auto target = y.row(row);
        const bool more = first + blocks_rows < end;
        const Element *next = source(row + blocks_rows) + column_0;
#pragma unroll 1
        for (int share = 0, column = column_0; share < place.shares; ++share, column += step, next += step) {
            float values[2][8];
            const bool there = column < cols;
            const int at = there ? column : 0;   // past the end, any share
            kept.get<Element>(share, values);
            if (fuses) norm_usual_share<Element, true>(moments, options.offset, weight, bias, at, values);
            else norm_share<true, Element>(moments, options, weight, bias, at, produce_share, values);
            if (more && there) kept.begin(share, next);
            y.store<true>(target, column, values);
        }
        if (row >= y.rows && row < end) y.clear(row, place.lane(), place.lanes);
    }
}

// Stores eight values to a 16-byte aligned address, rounded to nearest, ties to even.
template <class Element>
__device__ inline void store_eight(Element *target, const float (&values)[8]) {
    constexpr int count = tile::elements_per_chunk<Element>;
#pragma unroll
    for (int i = 0; i < 8; i += count) {
        float some[count];
#pragma unroll
        for (int j = 0; j < count; ++j) some[j] = values[i + j];
        tile::store(target + i, tile::pack(some, Element{}));
    }
}

// The threads of a lane in norm_few().
constexpr int few_threads = 2;

// Whether norm_few() applies: rows are whole, a lane has few shares, and the blocks have threads for all rows at once.
// Null pointers and their strides are 0.
template <class Element>
__device__ inline bool is_few(const NormInput<Element> &input, const NormOptions &options, const OutputRows &y,
                              int64_t rows, const NormLanes &place, int cols) {
    const auto bits = [](auto... pointers) { return (uint32_t(reinterpret_cast<uintptr_t>(pointers)) | ...); };
    const auto all =
        bits(input.x, input.residual, input.total, y.bf16, y.f16, y.f32, options.weight.bf16, options.weight.f16,
             options.weight.f32, options.bias.bf16, options.bias.f16, options.bias.f32);
    const uint32_t strides = input.x_stride | input.residual_stride | input.total_stride | y.stride;
    return (all % 16 | strides % 8 | uint32_t(cols) % (2 * produce_share)) == 0 && place.shares <= norm_shares &&
           int64_t(gridDim.x) * (produce_threads / few_threads >> place.power) >= rows;
}

// Norms of few whole rows into floats: the threads of all blocks have all rows at once. Both threads of a lane add all
// of its shares; each stores eight columns of a share. All loads start before the first value is used: those of weights
// and biases end in shared memory, where they take no registers.
template <class Element>
__device__ __forceinline__ void norm_few(NormHeldShared &shared, const NormInput<Element> &input,
                                         const NormOptions &options, const OutputRows &y, int rows,
                                         const NormLanes &place, int cols) {
    const int thread = threadIdx.x & (place.lanes * few_threads - 1), lane = thread / few_threads;
    const bool upper = thread % few_threads;   // this thread has the last eight columns of a share
    const int row = (threadIdx.x / few_threads >> place.power) * gridDim.x + blockIdx.x;
    const int columns[norm_shares] = {lane * produce_share, (lane + place.lanes) * produce_share};
    const bool there[norm_shares] = {row < rows && columns[0] < cols, row < rows && columns[1] < cols};
    wait_for_launches_ahead();
    // Loads.
    RowShares<Element, 1> of_x[norm_shares], of_residual[norm_shares];
    const Element *const x = input.x + row * input.x_stride, *const residual =
                                                                 input.residual + row * input.residual_stride;
#pragma unroll
    for (int i = 0; i < norm_shares; ++i) {
        of_x[i].clear(), of_residual[i].clear();
        if (there[i]) of_x[i].template load<true>(x, columns[i], cols);
        if (there[i] && input.residual) of_residual[i].template load<true>(residual, columns[i], cols);
    }
    const TypedRows<const char> weight(options.weight), bias(options.bias);
#pragma unroll
    for (int i = 0; i < norm_shares; ++i) {
        if (!there[i]) continue;
        shared.kept.begin_eight(4 * i, weight, columns[i] + 8 * upper);
        shared.kept.begin_eight(4 * i + 2, bias, columns[i] + 8 * upper);
    }
    ptx::cp_async_commit_group();
    float values[norm_shares][2][8];
#pragma unroll
    for (int i = 0; i < norm_shares; ++i) of_x[i].unpack(0, values[i]);
    if (input.residual) {
#pragma unroll
        for (int i = 0; i < norm_shares; ++i) {
            float other[2][8];
            of_residual[i].unpack(0, other);
#pragma unroll
            for (int j = 0; j < 16; ++j) values[i][j / 8][j % 8] += other[j / 8][j % 8];
            if (options.rounds) round_values<Element>(values[i]);
        }
    }
    // Sums.
    int turn = 0;
    const RowMoments moments =
        row_moments<true, few_threads>(shared.sums, turn, place, cols, options.centered, options.eps, [&](auto &&add) {
#pragma unroll
            for (int i = 0; i < norm_shares; ++i)
                if (there[i]) add(columns[i], values[i]);
        });
    // The output, rounded as by norm_sums() or norm_copies(). The loop's code is long and is executed once or twice.
    const bool fuses =
        !input.residual && !input.total && usual_norm<Element>(options, weight, bias) == UsualNorm::centered;
    float mine[norm_shares][8];
#pragma unroll
    for (int i = 0; i < norm_shares; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) mine[i][j] = upper ? values[i][1][j] : values[i][0][j];
    ptx::cp_async_wait_group<0>();
#pragma unroll 1
    for (int i = 0; i < norm_shares && (i ? there[1] : there[0]); ++i) {
        const int column = (i ? columns[1] : columns[0]) + 8 * upper;
        float value[8], more[8];
        const auto each = [&value](auto &&change) {
#pragma unroll
            for (int j = 0; j < 8; ++j) change(value[j], j);
        };
        each([&](float &one, int j) { one = mine[0][j], mine[0][j] = mine[1][j]; });
        if (input.total) store_eight(input.total + row * input.total_stride + column, value);
        if (options.centered)
            each([&](float &one, int) { one = (one - moments.mean - moments.rest) * moments.factor; });
        else each([&](float &one, int) { one *= moments.factor; });
        if (options.rounds) tile::unpack(tile::pack(value, Element{}), value, Element{});
        if (weight.type) {
            shared.kept.get_eight(4 * i, weight, more);
#pragma unroll
            for (float &factor : more) factor += options.offset;
            if (!fuses) each([&](float &one, int j) { one = __fmul_rn(one, more[j]); });
        }
        if (bias.type) {
            float terms[8];
            shared.kept.get_eight(4 * i + 2, bias, terms);
            if (fuses) each([&](float &one, int j) { one = fmaf(one, more[j], terms[j]); });
            else each([&](float &one, int j) { one = __fadd_rn(one, terms[j]); });
        }
        const int64_t at = row * y.stride + column;
        if (y.bf16) store_eight(y.bf16 + at, value);
        else if (y.f16) store_eight(y.f16 + at, value);
        else store_eight(y.f32 + at, value);
    }
}

// produced: gives the output rows, `out` or quantized.
template <class Element, class Make>
__device__ __forceinline__ void norm_rows(NormHeldShared &shared, const NormInput<Element> &input,
                                          const NormOptions &options, const OutputRows &out, int64_t rows, int cols,
                                          Make &&produced) {
    const NormLanes place(cols);
    if constexpr (sizeof(Element) == 2)
        if (out.there() && is_few(input, options, out, rows, place, cols))
            return norm_few(shared, input, options, out, rows, place, cols);
    wait_for_launches_ahead();
    const Produced y = produced();
    const bool whole = input.is_whole(y.cols) && y.is_whole() && is_chunk(options.weight.bf16) &&
                       is_chunk(options.weight.f16) && is_chunk(options.weight.f32) && is_chunk(options.bias.bf16) &&
                       is_chunk(options.bias.f16) && is_chunk(options.bias.f32);
    const bool sums = input.residual || input.total;
    const int shares = place.shares;
    if (!whole || shares > (sums ? KeptRows::shares<float> : KeptRows::shares<Element>)) {
        norm_sums<Element, false>(shared, input, options, y);
    } else if (sums) {
        norm_sums<Element, true>(shared, input, options, y);
    } else {
        if constexpr (sizeof(Element) == 2) {
            const TypedRows<const char> weight(options.weight), bias(options.bias);
            if (is_held<Element>(options, bias, place) &&
                norm_held<Element>(shared, input, options, weight, bias, y, place))
                return;
        }
        norm_copies<Element>(shared, input, options, y);
    }
}

}   // namespace op
