// The columns of a product as int8: what every integer kernel multiplies with.
#pragma once

#include <cstddef>
#include <cstdint>

namespace esp::kernels {
namespace { // compiled for several ISAs: the linker must not share what is inlined here

// Laid out block by block, the columns of a block side by side, so that a tile of columns is read in one stream.
struct Int8Columns {
    std::int8_t *values;   // [block][column][32]
    float *scales;         // [block][column]
    float *sums;           // [block][column]: scale * sum of the values
    std::int32_t *offsets; // [block][column][half]: -zero point * sum of the values
    std::int64_t n_columns;
    std::int64_t n_halves;

    struct View {
        std::int8_t *values;
        float *scales;
        float *sums;
        std::int32_t *offsets;

        View after(std::int64_t n, std::int64_t n_halves) const {
            return {values + 32 * n, scales + n, sums + n, offsets + n_halves * n};
        }
    };

    View at(std::int64_t block, std::int64_t column) const {
        const std::int64_t index = block * n_columns + column;
        return {values + 32 * index, scales + index, sums + index, offsets + n_halves * index};
    }

    template <int halves> static std::size_t size(std::int64_t n_k, std::int64_t n_columns) {
        const auto cells = static_cast<std::size_t>(n_k / 32 * n_columns);
        return (cells * (32 + 4 + 4 + 4 * halves) + 63) / 64 * 64;
    }

    static Int8Columns of(const std::byte *memory, std::int64_t n_k, std::int64_t n_columns, int n_halves) {
        auto *const bytes = const_cast<std::byte *>(memory); // the product reads only
        const auto cells = static_cast<std::size_t>(n_k / 32 * n_columns);
        return {reinterpret_cast<std::int8_t *>(bytes),
                reinterpret_cast<float *>(bytes + 32 * cells),
                reinterpret_cast<float *>(bytes + 36 * cells),
                reinterpret_cast<std::int32_t *>(bytes + 40 * cells),
                n_columns,
                n_halves};
    }
};

} // namespace
} // namespace esp::kernels
