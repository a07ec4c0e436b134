// Rows of keys and of values in pages: where key j of a sequence lies.
#pragma once

#include <cstdint>

#include "../kernel.cuh"

namespace op {

// Strides in bytes over [pages, heads, page, row]. Those of pages and of tokens are less than 2^31.
struct PageStrides {
    long long page, head, token;

    // Where a row of a page begins, from that of row 0 of page 0. 32-bit numbers times each other, 64 bits wide.
    __device__ const char *row(const char *base, unsigned in_page, unsigned at) const {
        return base + static_cast<unsigned long long>(in_page) * static_cast<unsigned>(page) + at * static_cast<unsigned>(token);
    }
};

// Rows of a cache: codes, and their scales, of one head from here on.
struct PagedRows {
    const char *codes, *scales;   // scales null where there are none
    PageStrides code_strides, scale_strides;
    int chunks, scale_bytes;      // of a row that are there
    bool aligned;                 // whether rows of scales begin at multiples of `unit`, of 4 or more

    __device__ PagedRows(const void *codes, const PageStrides &code_strides, const void *scales, const PageStrides &scale_strides,
                         int head, int row_bytes, int scale_bytes, int unit)
        : codes(static_cast<const char *>(codes) + head * code_strides.head),
          scales(static_cast<const char *>(scales) + (scales ? head * scale_strides.head : 0)), code_strides(code_strides),
          scale_strides(scale_strides), chunks(row_bytes / 16), scale_bytes(scale_bytes) {
        const long long all = reinterpret_cast<uintptr_t>(this->scales) | scale_strides.page | scale_strides.token;
        aligned = unit >= 4 && all % (unit > 0 ? unit : 1) == 0 && scale_bytes <= unit;
    }
};

// The pages of a sequence: key j is row j % page of page pages[j / page]. Of pages behind the last key nothing is read.
struct PageTable {
    const int *pages;
    int page;
    int shift;   // whose power of two a page is; -1 where it is none, or fewer than `unit` keys

    __device__ PageTable(const int *pages, int page, int unit)
        : pages(pages), page(page), shift((page & (page - 1)) == 0 && page >= unit ? __ffs(page) - 1 : -1) {}

    struct Place {
        int page, row;
    };
    __device__ Place place(int key) const {
        const int at = static_cast<unsigned>(key) / static_cast<unsigned>(page);
        return {__ldg(pages + at), key - at * page};
    }
};

// Where some neighbouring keys begin that lie in one page, all of them to be read: a table whose shift is not -1.
struct UnitPlace {
    const char *codes, *scales;

    __device__ UnitPlace(const PageTable &table, const PagedRows &rows, int first_key) {
        const unsigned page = __ldg(table.pages + (first_key >> table.shift)), row = first_key & (table.page - 1);
        codes = rows.code_strides.row(rows.codes, page, row);
        scales = rows.scale_strides.row(rows.scales, page, row);
    }
};

}  // namespace op
