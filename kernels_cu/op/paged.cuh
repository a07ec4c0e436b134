// Rows of keys and values in pages: the address of key j of a sequence.
#pragma once

#include <cstdint>

#include "../kernel.cuh"

namespace op {

// Strides in bytes over [pages, head, page, row]. Those of tokens are less than 2^31.
struct PageStrides {
    long long page, head, token;

    // The address of a row of a page, relative to row 0 of page 0.
    __device__ const char *row(const char *base, unsigned in_page, unsigned at) const {
        return base + in_page * page + static_cast<unsigned long long>(at) * static_cast<unsigned>(token);
    }
};

// Parameters of entries, in elements.
#define STRIDES_PAGES(array) long long array##_page, long long array##_head, long long array##_token
#define THE_STRIDES_PAGES(array, bytes) {bytes * array##_page, bytes * array##_head, bytes * array##_token}

// Rows of a cache: codes and scales, from one head on.
struct PagedRows {
    const char *codes, *scales;   // scales may be null
    PageStrides code_strides, scale_strides;
    int chunks, scale_bytes;   // of a row, without padding
    bool aligned;              // whether rows of scales are 4-byte aligned

    __device__ PagedRows(const void *codes, const PageStrides &code_strides, const void *scales,
                         const PageStrides &scale_strides, int head, int row_bytes, int scale_bytes)
        : codes(static_cast<const char *>(codes) + head * code_strides.head),
          scales(static_cast<const char *>(scales) + (scales ? head * scale_strides.head : 0)),
          code_strides(code_strides), scale_strides(scale_strides), chunks(row_bytes / 16), scale_bytes(scale_bytes),
          aligned((reinterpret_cast<uintptr_t>(this->scales) | scale_strides.page | scale_strides.token) % 4 == 0) {}

    // Whether rows of `bytes` scales follow one another, from addresses on that are 4-byte aligned.
    __device__ bool has_packed_scales(int bytes) const {
        return scale_bytes == bytes && scale_strides.token == bytes &&
               (reinterpret_cast<uintptr_t>(scales) | scale_strides.page) % 4 == 0;
    }
};

// The pages of a sequence: key j is row j % page of page pages[j / page]. Pages behind the last key are not read.
// Without a table, key j is row first + j of page `number`.
struct PageTable {
    const int *pages;
    int page;
    int shift;   // page = 2^shift; -1 if page is no power of two or less than `unit`
    int number = 0, first = 0;

    __device__ PageTable(const int *pages, int page, int unit)
        : pages(pages), page(page), shift((page & (page - 1)) == 0 && page >= unit ? __ffs(page) - 1 : -1) {}
    __device__ PageTable(int number, int first) : pages(nullptr), page(0), shift(31), number(number), first(first) {}

    struct Place {
        int page, row;
    };
    __device__ Place place(int key) const {
        if (!pages) return {number, first + key};
        const int at = static_cast<unsigned>(key) / static_cast<unsigned>(page);
        return {__ldg(pages + at), key - at * page};
    }

    // place() in two steps, for tables whose shift is not -1.
    __device__ int page_of(int key) const { return pages ? __ldg(pages + (key >> shift)) : number; }
    __device__ int row_of(int key) const { return pages ? key & (page - 1) : first + key; }
};

}   // namespace op
