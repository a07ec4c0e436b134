// Rows of A that a product of few rows norms itself, with the bits of norm_rows(): each block has them in shared
// memory.
#pragma once

#include <cstdint>

#include "../ptx/access.cuh"
#include "../ptx/access_early.cuh"
#include "../tile/format.cuh"
#include "gemm.cuh"
#include "moments.cuh"

namespace op {

// Rows of A in 16 bits. With weights [depth], A is the rows divided by their root mean square, times the weights,
// rounded once; these rows may be float32.
template <class Element_>
struct NormedRows : OperandRows {
    using Element = Element_;
    const float *weight;   // or null
    float eps;
    bool wide;   // rows of float32

    __device__ int cols() const { return bytes / int(sizeof(Element)); }
};

// The most rows that are normed, and the normed rows. A block norms all at once, so that longer rows are fewer. Rows
// begin 64 bytes behind multiples of 128, so that loads of neighboring rows have no bank conflicts.
struct NormedShared {
    static constexpr int most = 8;
    NormShared sums;
    alignas(16) uint8_t bytes[64 * (norm_threads + most)];

    __device__ static int stride(const NormLanes &lanes) { return 64 * (lanes.lanes + 1); }
};

// The rows of a block that has at most `most` of them, while they are normed. Called by all threads. Without weights
// nothing is done.
template <class RowsA, bool may_be_normed>
struct NormOf {
    __device__ NormOf(const RowsA &, const TilePlace &) {}
    __device__ bool wanted() const { return false; }
    __device__ void load() {}
    template <class Shared>
    __device__ void store(Shared &) {}
};
template <class Element>
struct NormOf<NormedRows<Element>, true> {
    NormLanes lanes;
    int cols;
    float eps;
    int bytes;             // of a value of a row
    const uint8_t *x;      // this lane's first share of its row
    const float *weight;   // of that share
    bool there[norm_shares];
    uint32_t of_x[norm_shares][2][2][4], of_weight[norm_shares][2][2][4];   // of eight values each

    __device__ NormOf(const NormedRows<Element> &a, const TilePlace &place)
        : lanes(a.cols()), cols(a.cols()), eps(a.eps), bytes(a.wide ? 4 : 2) {
        const int row = place.first_row + lanes.row(), column = lanes.column(0);
        const uint8_t *const first = a.data + place.matrix * a.batch + row * a.stride;
        // Opaque values, so that the compiler does not work them out behind the wait.
        x = ptx::of_this_branch(first + column * bytes);
        weight = ptx::of_this_branch(a.weight ? a.weight + column : nullptr);
#pragma unroll
        for (int i = 0; i < norm_shares; ++i)
            there[i] = ptx::of_this_branch(row < place.end_row && lanes.column(i) < cols);
    }

    __device__ bool wanted() const { return weight; }

    // Starts loading all shares.
    __device__ void load() {
        if (!wanted()) return;
#pragma unroll
        for (int i = 0; i < norm_shares; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int column = i * lanes.lanes * norm_columns + 8 * j;
                ptx::ld_global_16(of_x[i][j][0], x + column * bytes, there[i]);
                ptx::ld_global_16(of_x[i][j][1], x + column * bytes + 16, there[i] && bytes == 4);
                ptx::ld_global_16(of_weight[i][j][0], weight + column, there[i]);
                ptx::ld_global_16(of_weight[i][j][1], weight + column + 4, there[i]);
            }
    }

    // Stores the normed rows. All threads see them afterwards.
    template <class Shared>
    __device__ void store(Shared &of_block) {
        if (!wanted()) return;
        NormedShared &shared = of_block.of_a.normed;
        float values[norm_shares][2][8];
#pragma unroll
        for (int i = 0; i < 2 * norm_shares; ++i) {
            const uint32_t (&words)[2][4] = of_x[i / 2][i % 2];
            float (&eight)[8] = values[i / 2][i % 2];
            tile::unpack(uint4{words[0][0], words[0][1], words[0][2], words[0][3]}, eight, Element{});
#pragma unroll
            for (int k = 0; k < 8; ++k) eight[k] = bytes == 4 ? __uint_as_float(words[k / 4][k % 4]) : eight[k];
        }
        int turn = 0;
        const RowMoments moments = row_moments<true>(shared.sums, turn, lanes, cols, false, eps, [&](auto &&add) {
#pragma unroll
            for (int i = 0; i < norm_shares; ++i)
                if (there[i]) add(lanes.column(i), values[i]);
        });
#pragma unroll
        for (int i = 0; i < norm_shares; ++i) {
            if (!there[i]) continue;
            auto *const row = reinterpret_cast<Element *>(shared.bytes + lanes.row() * NormedShared::stride(lanes));
#pragma unroll
            for (int j = 0; j < 2; ++j) {
#pragma unroll
                for (int k = 0; k < 8; ++k)
                    values[i][j][k] *= moments.factor,
                        values[i][j][k] *= __uint_as_float(of_weight[i][j][k / 4][k % 4]);
                *reinterpret_cast<uint4 *>(row + lanes.column(i) + 8 * j) = tile::pack(values[i][j], Element{});
            }
        }
        ptx::bar_sync();
    }
};

}   // namespace op
