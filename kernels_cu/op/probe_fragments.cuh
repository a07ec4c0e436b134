// Where functions of tile/ put elements and scales of fragments, for comparison with the findings of the probes of
// mma.sync.
#pragma once

#include <cstdint>

#include "../ptx/warp.cuh"
#include "../tile/fragment.cuh"
#include "../tile/scale.cuh"
#include "../tile/shared.cuh"

namespace op {

// A tile of 16 rows of 32 bytes and the scales of 16 and 32 rows: enough for one MMA's A and two neighbouring B.
struct FragmentTiles {
    tile::SharedTile<16, 32> bytes;
    tile::ScaleWords<16, 8> scales_a;   // two words to a row
    tile::ScaleWords<32, 4> scales_b;
};

// Where the findings go: elements as 32 row + byte, scales as blocks of a row + block.
struct FragmentFindings {
    int *accumulator;    // [32, 4, 2]: row and column
    int *a;              // [32, 4, 4]: bytes of the registers of A
    int *b;              // [32, 2, 2, 4]: of two B
    int *b_transposed;   // [32, 2, 2, 4]: the same, loaded transposed
    int *scale_a;        // [32, 4]: the bytes of A's scale register; 8 blocks of a row
    int *scale_b;        // [32, 4]: the same of B; 4 blocks of a row
};

// places[lane][register][byte] = the number of the byte of `tiles` that load(registers) puts there. Each pass fills
// `tiles` with 8 bits of the numbers.
template <class Load>
__device__ inline void find_bytes(FragmentTiles &tiles, int *places, Load &&load) {
    const int lane = ptx::laneid();
    int found[16] = {};
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const uint32_t shown = (16 * lane + i) >> (8 * pass) & 0xff;
            words[i / 4] = i % 4 == 0 ? shown : words[i / 4] | shown << (8 * (i % 4));
        }
        ptx::bar_warp_sync();   // all lanes have loaded the old contents
        tiles.bytes.at(lane / 2, lane % 2) = {words[0], words[1], words[2], words[3]};
        ptx::bar_warp_sync();   // the tile is written
        uint32_t registers[4];
        load(registers);
#pragma unroll
        for (int i = 0; i < 16; ++i) found[i] |= (registers[i / 4] >> (8 * (i % 4)) & 0xff) << (8 * pass);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) places[16 * lane + i] = found[i];
}

// A word of four scales, whose bytes are the numbers first .. first + 3.
__device__ inline uint32_t numbered_scales(int first) { return 0x03020100u + 0x01010101u * first; }

// All findings. Called by one warp.
__device__ inline void probe_fragments(FragmentTiles &tiles, const FragmentFindings &findings) {
    const int lane = ptx::laneid();
    // Accumulators.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        findings.accumulator[8 * lane + 2 * i] = tile::accumulator_row(i);
        findings.accumulator[8 * lane + 2 * i + 1] = tile::accumulator_column(i);
    }
    // Elements of A and B.
    find_bytes(tiles, findings.a, [&](uint32_t (&a)[4]) { tile::load_a(a, tiles.bytes, 0, 0); });
    find_bytes(tiles, findings.b, [&](uint32_t (&registers)[4]) {
        tile::FragmentB b[2];
        tile::load_b(b, tiles.bytes, 0, 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) registers[i] = b[i / 2][i % 2];
    });
    find_bytes(tiles, findings.b_transposed, [&](uint32_t (&registers)[4]) {
        tile::FragmentB b[2];
        tile::load_b_transposed(b, tiles.bytes, 0, 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) registers[i] = b[i / 2][i % 2];
    });
    // Scales of A and B.
    for (int word = 0; word < 2; ++word)
        if (lane < 16) tiles.scales_a.words[word][lane] = numbered_scales(8 * lane + 4 * word);
    tiles.scales_b.words[0][lane] = numbered_scales(4 * lane);
    ptx::bar_warp_sync();   // all scales are written
    const uint32_t scale_a = tiles.scales_a.operand_a(0, 0), scale_b = tiles.scales_b.operand_b(0, 0);
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
        findings.scale_a[4 * lane + byte] = scale_a >> (8 * byte) & 0xff;
        findings.scale_b[4 * lane + byte] = scale_b >> (8 * byte) & 0xff;
    }
}

}   // namespace op
