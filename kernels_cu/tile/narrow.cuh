// Narrow formats: conversion of eight values of a lane to codes and back, and the layout of codes in memory.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/cvt.cuh"

namespace tile {

// A narrow format: `bits` of a code, `mantissa` bits, and `max_exponent` of its largest value `largest`, from OCP MX
// v1.0, section 5.3. encode() returns eight codes, code i in bits `bits` i and up of 8 `bits` / 32 little-endian words;
// the last word of a 6-bit format is half full. It takes floats in units of `unit`, or, with fewer instructions, pairs
// of bf16 and a power of two as their factor (in both halves of `factor`). decode() is its inverse.
template <int bits_>
struct Codes {
    static constexpr int words = (8 * bits_ + 31) / 32;
    uint32_t word[words];
};

__device__ inline void unpack_pair(uint32_t f16x2, float &low, float &high) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2 *>(&f16x2));
    low = pair.x;
    high = pair.y;
}

__device__ inline void unpack_bf16(const uint32_t (&pairs)[4], float (&values)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[2 * i] = ptx::low_bf16(pairs[i]);
        values[2 * i + 1] = ptx::high_bf16(pairs[i]);
    }
}

__device__ inline void unpack_scaled(const uint32_t (&pairs)[4], uint32_t factor, float (&values)[8]) {
    uint32_t scaled[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) scaled[i] = ptx::mul_bf16x2(pairs[i], factor);
    unpack_bf16(scaled, values);
}

// Decodes two words of four codes of a byte each.
template <class Format>
__device__ inline void unpack_bytes(const uint32_t (&four)[2], float (&values)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        unpack_pair(Format::pair(four[i / 2] >> (16 * (i % 2)) & 0xffffu), values[2 * i], values[2 * i + 1]);
}

struct E2m1 {
    static constexpr int bits = 4, mantissa = 1, max_exponent = 2;
    static constexpr float largest = 6.0f, unit = ptx::e2m1_unit;

    __device__ static Codes<bits> encode(const float (&values)[8]) {
        return {{ptx::cvt_rn_satfinite_e2m1x8_units(values)}};
    }
    __device__ static Codes<bits> encode_below_7(const float (&values)[8]) {
        return {{ptx::cvt_rn_satfinite_e2m1x8_units<true>(values)}};
    }
    __device__ static Codes<bits> encode(const uint32_t (&pairs)[4], uint32_t factor) {
        return {{ptx::cvt_rn_satfinite_e2m1x8_bf16x2(pairs, factor)}};
    }

    __device__ static void decode(const Codes<bits> &codes, float (&values)[8]) {
        static_for<4>(
            [&](auto i) { unpack_pair(ptx::cvt_rn_f16x2_e2m1x2<i>(codes.word[0]), values[2 * i], values[2 * i + 1]); });
    }
};

// Formats with a byte per code. Format::bytes() encodes four floats, Format::pair() decodes two codes to f16.
template <class Format>
struct ByteCodes {
    static constexpr int bits = 8;
    static constexpr float unit = 1.0f;

    __device__ static Codes<8> encode(const float (&values)[8]) {
        return {{Format::bytes(values), Format::bytes(values + 4)}};
    }

    __device__ static Codes<8> encode(const uint32_t (&pairs)[4], uint32_t factor) {
        float values[8];
        unpack_scaled(pairs, factor, values);
        return encode(values);
    }

    __device__ static void decode(const Codes<8> &codes, float (&values)[8]) {
        unpack_bytes<Format>(codes.word, values);
    }
};

struct E4m3 : ByteCodes<E4m3> {
    static constexpr int mantissa = 3, max_exponent = 8;
    static constexpr float largest = 448.0f;

    __device__ static uint32_t bytes(const float *values) { return ptx::cvt_rn_satfinite_e4m3x4_f32(values); }
    __device__ static uint32_t pair(uint32_t codes) { return ptx::cvt_rn_f16x2_e4m3x2(codes); }
};

struct E5m2 : ByteCodes<E5m2> {
    static constexpr int mantissa = 2, max_exponent = 15;
    static constexpr float largest = 57344.0f;

    __device__ static uint32_t bytes(const float *values) { return ptx::cvt_rn_satfinite_e5m2x4_f32(values); }
    __device__ static uint32_t pair(uint32_t codes) { return ptx::cvt_rn_f16x2_e5m2x2(codes); }
};

// Four 6-bit codes, one in bits 5..0 of each byte, as 24 bits; and back.
__device__ inline uint32_t pack_6bit(uint32_t bytes) {
    return __dp4a(bytes, 0x00004001u, 0u) + (__dp4a(bytes, 0x40010000u, 0u) << 12);   // 64 of each second byte
}
__device__ inline uint32_t unpack_6bit(uint32_t packed) {
    return (packed & 0x3fu) | (packed & 0xfc0u) << 2 | (packed & 0x3f000u) << 4 | (packed & 0xfc0000u) << 6;
}

// Eight codes from two groups of 24 bits; and the two groups of four bytes each back.
__device__ inline Codes<6> join_6bit(uint32_t first, uint32_t second) {
    const uint32_t low = pack_6bit(first), high = pack_6bit(second);
    return {{low | high << 24, high >> 8}};
}
__device__ inline void split_6bit(const Codes<6> &codes, uint32_t &first, uint32_t &second) {
    first = unpack_6bit(codes.word[0]);
    second = unpack_6bit(codes.word[0] >> 24 | codes.word[1] << 8);
}

// The same for formats with six bits per code, which bytes() returns in bits 5..0. bytes() also takes pairs of bf16 and
// a factor.
template <class Format>
struct SixBitCodes {
    static constexpr int bits = 6;
    static constexpr float unit = 1.0f;

    __device__ static Codes<6> encode(const float (&values)[8]) {
        return join_6bit(Format::bytes(values), Format::bytes(values + 4));
    }

    __device__ static Codes<6> encode(const uint32_t (&pairs)[4], uint32_t factor) {
        return join_6bit(Format::bytes(pairs, factor), Format::bytes(pairs + 2, factor));
    }

    __device__ static void decode(const Codes<6> &codes, float (&values)[8]) {
        uint32_t four[2];
        split_6bit(codes, four[0], four[1]);
        unpack_bytes<Format>(four, values);
    }
};

struct E3m2 : SixBitCodes<E3m2> {
    static constexpr int mantissa = 2, max_exponent = 4;
    static constexpr float largest = 28.0f;

    __device__ static uint32_t bytes(const float *values) { return ptx::cvt_rn_satfinite_e3m2x4_f32(values); }
    __device__ static uint32_t bytes(const uint32_t *pairs, uint32_t factor) {
        return ptx::cvt_rn_satfinite_e3m2x4_bf16x2(pairs, factor);
    }
    __device__ static uint32_t pair(uint32_t codes) { return ptx::cvt_rn_f16x2_e3m2x2(codes); }
};

struct E2m3 : SixBitCodes<E2m3> {
    static constexpr int mantissa = 3, max_exponent = 2;
    static constexpr float largest = 7.5f;

    __device__ static uint32_t bytes(const float *values) { return ptx::cvt_rn_satfinite_e2m3x4_f32(values); }
    __device__ static uint32_t bytes(const uint32_t *pairs, uint32_t factor) {
        return ptx::cvt_rn_satfinite_e2m3x4_bf16x2(pairs, factor);
    }
    __device__ static uint32_t pair(uint32_t codes) { return ptx::cvt_rn_f16x2_e2m3x2(codes); }
};

}   // namespace tile
