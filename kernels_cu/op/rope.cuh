// Rotary position embeddings: pairs of values of a row are rotated by the angles of its position.
#pragma once

#include <cstdint>

#include "norm.cuh"
#include "produce.cuh"

namespace op {

// Two shares of a row that a lane processes at once: share and share + 1 of NormLanes.
using HeadShares = float[norm_shares][2][8];

// The rotation. table[length, width] has width / 2 cosines, then as many sines, for each position. The columns first ..
// first + width - 1 of a row are rotated: i with i + width / 2, or, if `pairs`, 2 i with 2 i + 1.
struct Rotation {
    const float *table;
    int length, width, first;
    bool pairs, inverse;

    // Whether all columns are rotated and fill the lanes exactly; the table is 16-byte aligned.
    __device__ bool all_columns(const NormLanes &place, int cols) const {
        return first == 0 && width == cols && cols == norm_shares * place.lanes * produce_share && is_chunk(table);
    }

    // Whether, besides, the two shares of each lane are its row's pairs.
    __device__ bool straight(const NormLanes &place, int cols) const { return !pairs && all_columns(place, cols); }

    // The rotation of eight columns of rows at a position, and of the eight that lie half a row behind them.
    struct Turn {
        float cosines[8], sines[8];
        bool pairs;

        __device__ void operator()(float (&values)[2][8]) const {
            if (pairs) {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    turn_pair(values[i / 4][i % 4 * 2], values[i / 4][i % 4 * 2 + 1], cosines[i], sines[i]);
            } else {
#pragma unroll
                for (int i = 0; i < 8; ++i) turn_pair(values[0][i], values[1][i], cosines[i], sines[i]);
            }
        }
    };
    // Of rows of all_columns(). A position outside the table makes all values NaN.
    __device__ Turn of_columns(int position, int column) const {
        Turn turn;
        turn.pairs = pairs;
        const bool there = position >= 0 && position < length;
        const int first = pairs ? column / 2 : column, second = pairs ? first + width / 4 : first + 4;
        const float *const row = table + int64_t(there ? position : 0) * width;
        const auto load = [](const float *source, float *four) {
            float some[4];
            tile::unpack(__ldg(reinterpret_cast<const uint4 *>(source)), some, float{});
#pragma unroll
            for (int i = 0; i < 4; ++i) four[i] = some[i];
        };
        load(row + first, turn.cosines), load(row + second, turn.cosines + 4);
        load(row + width / 2 + first, turn.sines), load(row + width / 2 + second, turn.sines + 4);
        if (there) return turn;
#pragma unroll
        for (int i = 0; i < 8; ++i) turn.cosines[i] = turn.sines[i] = __int_as_float(0x7fffffff);
        return turn;
    }

    // The cosines and sines of a lane's shares of such a row. `there`: the position is in the table.
    struct Angles {
        RowShares<float, 1> cosines, sines;
        bool there;
    };
    // Starts loading the angles of a position.
    __device__ void begin(const NormLanes &place, int position, Angles &angles) const {
        angles.there = position >= 0 && position < length;
        const float *row = table + int64_t(angles.there ? position : 0) * width + place.column(0);
        angles.cosines.load<true>(row, 0, 0, 1);
        angles.sines.load<true>(row + width / 2, 0, 0, 1);
    }

    // Rotates a lane's shares of such a row. A position outside the table makes them NaN.
    __device__ void turn_halves(const Angles &angles, HeadShares &values) const {
        float cosines[2][8], sines[2][8];
        angles.cosines.unpack(0, cosines);
        angles.sines.unpack(0, sines);
        if (inverse) {
#pragma unroll
            for (int i = 0; i < 16; ++i) sines[i / 8][i % 8] = -sines[i / 8][i % 8];
        }
#pragma unroll
        for (int i = 0; i < 16; ++i)
            turn_pair(values[0][i / 8][i % 8], values[1][i / 8][i % 8], cosines[i / 8][i % 8], sines[i / 8][i % 8]);
        if (angles.there) return;
#pragma unroll
        for (int i = 0; i < norm_shares * 16; ++i) values[i / 16][i / 8 % 2][i % 8] = __int_as_float(0x7fffffff);
    }

    // Rotates a lane's shares of the row at a position. eight(column, values) loads values of the row before rotation,
    // from any column; one(column) loads one of them. A position outside the table makes rotated values NaN.
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
        } else if (straight(place, cols)) {
            Angles angles;
            begin(place, position, angles);
            turn_halves(angles, values);
        } else if (pairs && first % 2 == 0) {
            // Adjacent pairs: both values are in the lane.
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
                        turn_pair(some[2 * i], some[2 * i + 1], cosines[i], directed(sines[i]));
            }
        } else {
            // Otherwise the other value of a pair is loaded again: eight at a time if all parts are aligned, else one
            // by one.
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
                        some[i] = turned(some[i], others[i], cosines[0][i], directed(sine));
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
                            if (j == i) some[j] = turned(some[j], other, row[pair], directed(sine * row[half + pair]));
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
    __device__ float directed(float sine) const { return inverse ? -sine : sine; }
    // cosine times a value plus sine times the other one of its pair. Callers negate sine for the first of a pair.
    __device__ static float turned(float value, float other, float cosine, float sine) {
        return fmaf(value, cosine, sine * other);
    }
    __device__ static void turn_pair(float &one, float &other, float cosine, float sine) {
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

// Token and head of a row, and of rows further on, without a division for each.
struct HeadOf {
    int64_t token;
    int head;

    __device__ HeadOf(int64_t row, int heads) : token(row / heads), head(row - token * heads) {}
    __device__ HeadOf(int row, int heads) : token(unsigned(row) / unsigned(heads)), head(row - int(token) * heads) {}
    __device__ void move_on(const HeadOf &rows, int heads) {
        token += rows.token, head += rows.head;
        if (head >= heads) head -= heads, ++token;
    }
};

// y[tokens, heads, cols]: x rotated by the positions of the tokens. Floats go to y's `out`, whose heads are out_head
// elements apart; codes go to y, whose rows are the heads of tokens in order. rounds: results are rounded to x's type
// first. straight: the rotation is straight(), and all rows are whole.
template <class Element, bool straight, Form form>
__device__ __forceinline__ void rope_rows(const HeadRows<const Element> &x, const Rotation &rotation,
                                          const int *positions, bool rounds, int heads, int64_t out_head,
                                          const Produced &y) {
    // How the block's lanes divide rows, and where the first row is.
    const NormLanes place(y.cols);
    const int cols = y.cols, step = place.lanes * produce_share;
    const int64_t end = y.end(), blocks_rows = int64_t(gridDim.x) * place.rows(), head_bytes = y.out.bytes(out_head);
    const HeadOf last(y.rows - 1, heads), move(blocks_rows, heads);
    constexpr bool ahead = sizeof(Element) == 2;   // the next rows are in flight while these are processed
    HeadOf place_of_next(int64_t(blockIdx.x) * place.rows() + place.row(), heads);
    RowShares<Element, norm_shares> next;
    // A row to read for this one: the last one if it is past the end. Nothing is stored for it.
    const auto present = [&](const HeadOf &of) { return of.token > last.token ? last : of; };
    const auto begin = [&](const HeadOf &of, int share) {
        const HeadOf here = present(of);
        next.template load<straight>(x.row(here.token, here.head), place.column(share), step, cols);
    };
    if (ahead) begin(place_of_next, 0);
    // The position of the next row, and, if the output needs few registers, its angles and the position after it.
    constexpr bool angles_ahead = straight && ahead && form != Form::any;
    int next_position = positions[present(place_of_next).token];
    Rotation::Angles angles;
    const auto begin_angles = [&](const HeadOf &next) {
        rotation.begin(place, next_position, angles);
        HeadOf after = next;
        after.move_on(move, heads);
        next_position = positions[present(after).token];
    };
    if (angles_ahead) begin_angles(place_of_next);
#pragma unroll 1
    for (int64_t first = int64_t(blockIdx.x) * place.rows(); first < end; first += blocks_rows) {
        const int64_t row = first + place.row();
        const HeadOf here = place_of_next;
        place_of_next.move_on(move, heads);
        Produced::Row target = y.row<form>(row);
        target.out = y.out.first + here.token * y.out.stride + here.head * head_bytes;
#pragma unroll 1
        for (int share = 0; share < (straight ? 1 : place.shares); share += norm_shares) {
            // Values of this row; the next row is in flight.
            HeadShares values;
            if (!ahead || share) begin(here, share);
#pragma unroll
            for (int i = 0; i < norm_shares; ++i) next.unpack(i, values[i]);
            if (ahead && (straight || share + norm_shares >= place.shares)) begin(place_of_next, 0);
            // The rotation.
            if constexpr (straight) {
                if (!angles_ahead) begin_angles(here);
                rotation.turn_halves(angles, values);
                if (angles_ahead) begin_angles(place_of_next);
            } else if (target.present) {
                const Element *source = x.row(here.token, here.head);
                rotation.turn(
                    place, share, cols, positions[here.token], values,
                    [&](int column, float (&others)[8]) {
                        float some[1][8];
                        load_share(source + column, 8, some);
#pragma unroll
                        for (int i = 0; i < 8; ++i) others[i] = some[0][i];
                    },
                    [&](int column) { return float(source[column]); });
            }
            // The output.
            const auto finish = [&](int share, float (&some)[2][8]) {
                if (rounds) round_values<Element>(some);
                y.store<straight, form>(target, place.column(share), some);
            };
            if constexpr (straight) {
                finish(0, values[0]), finish(1, values[1]);
            } else {
#pragma unroll 1
                for (int i = 0; i < norm_shares; ++i) {
                    finish(share + i, values[0]);
#pragma unroll
                    for (int j = 0; j < 16; ++j) values[0][j / 8][j % 8] = values[1][j / 8][j % 8];
                }
            }
        }
        if (row >= y.rows && row < end) y.clear<form>(row, place.lane(), place.lanes);
    }
}

template <class Element>
__device__ __forceinline__ void rope_rows(const HeadRows<const Element> &x, const Rotation &rotation,
                                          const int *positions, bool rounds, int heads, int64_t out_head,
                                          const Produced &y) {
    const bool whole = is_whole_rows(x.first, x.token_stride, y.cols) && x.head_stride % 8 == 0 && y.is_whole() &&
                       (y.quantizes() || out_head % 8 == 0);
    if (!whole || !rotation.straight(NormLanes(y.cols), y.cols)) {
        rope_rows<Element, false, Form::any>(x, rotation, positions, rounds, heads, out_head, y);
    } else if (!with_usual_form<Element>(y, [&](auto form) {
                   rope_rows<Element, true, form>(x, rotation, positions, rounds, heads, out_head, y);
               })) {
        rope_rows<Element, true, Form::any>(x, rotation, positions, rounds, heads, out_head, y);
    }
}

}   // namespace op
