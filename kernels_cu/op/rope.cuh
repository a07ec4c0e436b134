// Rotary position embeddings: pairs of values of a row turned by the angles of its position.
#pragma once

#include <cstdint>

#include "norm.cuh"
#include "produce.cuh"

namespace op {

// Two shares of a row that a lane has at a time: those with the numbers `share` and share + 1 of NormLanes.
using HeadShares = float[norm_shares][2][8];

// How rows are turned. table[length, width]: of each position width / 2 cosines, then as many sines. The columns
// first .. first + width - 1 of a row turn: i with i + width / 2, or, as `pairs`, 2 i with 2 i + 1.
struct Rotation {
    const float *table;
    int length, width, first;
    bool pairs, inverse;

    // A lane's shares of the row at a position. eight(column, values) gives values of the row as they are before they
    // turn, from any column; one(column) one of them. A position outside the table makes NaN of what turns.
    template <class Eight, class One>
    __device__ void turn(const NormLanes &place, int share, int cols, int position, HeadShares &values, Eight &&eight,
                         One &&one) const {
        const float *row = table + int64_t(position) * width;
        const int half = width / 2;
        if (position < 0 || position >= length) {
#pragma unroll
            for (int i = 0; i < norm_shares * 16; ++i)
                if (turns(place.column(share + i / 16) + i % 16))
                    values[i / 16][i / 8 % 2][i % 8] = __int_as_float(0x7fffffff);
        } else if (!pairs && first == 0 && width == cols && cols == norm_shares * place.lanes * produce_share) {
#pragma unroll
            for (int group = 0; group < 2; ++group) {   // a lane has both values of each pair
                float cosines[1][8], sines[1][8];
                load_share(row + place.column(0) + 8 * group, 8, cosines);
                load_share(row + half + place.column(0) + 8 * group, 8, sines);
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    turn_pair(values[0][group][i], values[1][group][i], cosines[0][i], sines[0][i]);
            }
        } else if (pairs && first % 2 == 0) {
#pragma unroll
            for (int of = 0; of < 2 * norm_shares; ++of) {
                float (&some)[8] = values[of / 2][of % 2];
                const int column = place.column(share + of / 2) + of % 2 * 8 - first;
                if (column >= width || column + 8 <= 0) continue;
                float cosines[4], sines[4];
                const float *angle = row + column / 2;
                if (column >= 0 && column + 8 <= width && is_chunk(angle) && is_chunk(angle + half)) {
                    tile::unpack(__ldg(reinterpret_cast<const uint4 *>(angle)), cosines, float{});
                    tile::unpack(__ldg(reinterpret_cast<const uint4 *>(angle + half)), sines, float{});
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const bool there = column + 2 * i >= 0 && column + 2 * i < width;
                        cosines[i] = there ? angle[i] : 1.0f;
                        sines[i] = there ? angle[half + i] : 0.0f;
                    }
                }
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (column + 2 * i >= 0 && column + 2 * i < width)
                        turn_pair(some[2 * i], some[2 * i + 1], cosines[i], sines[i]);
            }
        } else {
            const bool eights = !pairs && first % 8 == 0 && half % 8 == 0;
#pragma unroll
            for (int of = 0; of < 2 * norm_shares; ++of) {
                float (&some)[8] = values[of / 2][of % 2];
                const int column = place.column(share + of / 2) + of % 2 * 8;
                if (eights && turns(column)) {
                    const int pair = (column - first) % half;
                    float others[8], cosines[1][8], sines[1][8];
                    eight(partner(column), others);
                    load_share(row + pair, 8, cosines);
                    load_share(row + half + pair, 8, sines);
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        const float sine = is_second(column) ? sines[0][i] : -sines[0][i];
                        some[i] = turned(some[i], others[i], cosines[0][i], sine);
                    }
                } else if (!eights) {
#pragma unroll 1
                    for (int i = 0; i < 8; ++i) {
                        const int at = column + i;
                        if (!turns(at)) continue;
                        const int pair = pairs ? (at - first) / 2 : (at - first) % half;
                        const float other = one(partner(at)), sine = is_second(at) ? 1.0f : -1.0f;
#pragma unroll
                        for (int j = 0; j < 8; ++j)
                            if (j == i) some[j] = turned(some[j], other, row[pair], sine * row[half + pair]);
                    }
                }
            }
        }
    }

private:
    __device__ bool turns(int column) const { return column >= first && column < first + width; }
    __device__ bool is_second(int column) const { return pairs ? (column - first) % 2 : column - first >= width / 2; }
    __device__ int partner(int column) const {
        const int apart = pairs ? 1 : width / 2;
        return is_second(column) ? column - apart : column + apart;
    }
    // A value and `sine` times the other one of its pair, which is negative for the first.
    __device__ float turned(float value, float other, float cosine, float sine) const {
        return fmaf(value, cosine, (inverse ? -sine : sine) * other);
    }
    __device__ void turn_pair(float &one, float &other, float cosine, float sine) const {
        const float before = one;
        one = turned(before, other, cosine, -sine);
        other = turned(other, before, cosine, sine);
    }
};

// Rows x[tokens, heads, cols], strides in elements.
template <class Element>
struct HeadRows {
    Element *first;
    int64_t token_stride, head_stride;

    __device__ Element *row(int64_t token, int head) const { return first + token * token_stride + head * head_stride; }
};

// y[tokens, heads, cols]: x turned by the positions of the tokens. Floats go to `out`, whose strides are those of the
// one that is there; codes to y, whose rows are heads of tokens in order. rounds: to x's type first.
template <class Element>
__device__ inline void rope_rows(const HeadRows<const Element> &x, const Rotation &rotation, const int *positions,
                                 bool rounds, int heads, const OutputRows &out, int64_t out_head, const Produced &y) {
    const NormLanes place(y.cols);
    const int cols = y.cols, step = place.lanes * produce_share;
    const int64_t end = y.end(), blocks_rows = int64_t(gridDim.x) * place.rows();
    const bool few = end <= INT32_MAX - blocks_rows;
    constexpr bool ahead = sizeof(Element) == 2;   // the next rows are on their way while these are worked on
    int64_t token;
    int head;
    const auto find = [&](int64_t row) {
        if (few) token = uint32_t(row) / uint32_t(heads);
        else token = row / heads;
        head = row - token * heads;
    };
    RowShares<Element, norm_shares> next;
    const auto begin = [&](int64_t row, int share) {
        find(row);
        next.load(x.row(token, head), row < y.rows, place.column(share), step, cols);
    };
    if (ahead) begin(int64_t(blockIdx.x) * place.rows() + place.row(), 0);
#pragma unroll 1
    for (int64_t first = int64_t(blockIdx.x) * place.rows(); first < end; first += blocks_rows) {
        const int64_t row = first + place.row();
#pragma unroll 1
        for (int share = 0; share < place.shares; share += norm_shares) {
            HeadShares values;
            if (!ahead || share) begin(row, share);
            find(row);
            const Element *source = x.row(token, head);
            const int64_t out_token = token;
            const int out_of = head;
#pragma unroll
            for (int i = 0; i < norm_shares; ++i) next.unpack(i, values[i]);
            if (ahead && share + norm_shares >= place.shares) begin(row + blocks_rows, 0);
            if (row < y.rows)
                rotation.turn(
                    place, share, cols, positions[out_token], values,
                    [&](int column, float (&others)[8]) {
                        float some[1][8];
                        load_share(source + column, 8, some);
#pragma unroll
                        for (int i = 0; i < 8; ++i) others[i] = some[0][i];
                    },
                    [&](int column) { return float(source[column]); });
#pragma unroll 1
            for (int i = 0; i < norm_shares; ++i) {
                const int column = place.column(share + i);
                float (&some)[2][8] = values[0];
#pragma unroll
                for (int j = 0; j < 16; ++j)
                    if (rounds) some[j / 8][j % 8] = rounded<Element>(some[j / 8][j % 8]);
                if (row < y.rows && column < cols) {
                    const int64_t at = out_token * out.stride + out_of * out_head;
                    const OutputRows here = {out.bf16 ? out.bf16 + at : nullptr, out.f16 ? out.f16 + at : nullptr,
                                             out.f32 ? out.f32 + at : nullptr, 0};
                    store_share(here, 0, column, cols, some);
                }
                if (y.quantizes()) y.quantized.store(row, column, cols, row < y.rows, some);
#pragma unroll
                for (int j = 0; j < 16; ++j) some[j / 8][j % 8] = values[1][j / 8][j % 8];
            }
        }
        if (row >= y.rows && row < end) y.clear(row, place.lane(), place.lanes);
    }
}

}   // namespace op
