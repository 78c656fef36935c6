// Where the rows of a pass stand: positions, and tree visibility expressed through sequence ids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace esp {

inline constexpr std::int32_t max_sequences = 256; // LLAMA_MAX_SEQ

// A row sees a KV cell if the cell's sequence set contains the row's first sequence id and its position is not later.
// So every owner of masks and every leaf gets a sequence of its own; a node belongs to its own sequence and to those of
// all its descendants; the masks of an owner belong to the owner's sequence only, hence no node sees a mask and no mask
// sees another owner's.
//
// Rows: nodes (root first), then the masks owner by owner. The root belongs to every sequence of the session; its list
// holds only the ones used here and the decode step adds the others.
struct TreeLayout {
    std::vector<std::int32_t> depth;      // [n_rows] position relative to the root
    std::vector<std::int32_t> seq_offset; // [n_rows + 1] into seq_ids
    std::vector<std::int32_t> seq_ids;    // the first of a row is the one that row sees through
    std::int32_t n_nodes = 0;
    std::int32_t n_sequences = 0;

    std::int32_t n_rows() const { return static_cast<std::int32_t>(depth.size()); }
    std::int32_t first_sequence(std::int32_t row) const {
        return seq_ids[static_cast<std::size_t>(seq_offset[static_cast<std::size_t>(row)])];
    }

    // parents[0] == -1 and 0 <= parents[i] < i; masks[i] >= 0. Throws std::invalid_argument otherwise, or when more
    // than max_sequences sequences would be needed.
    static TreeLayout build(const std::int32_t *parents, const std::int32_t *masks, std::size_t n_nodes);

    // Rows that the caller laid out (the naive implementation of the paper's Table 4). Same checks on ranges.
    static TreeLayout from_rows(std::vector<std::int32_t> depth, std::vector<std::int32_t> seq_offset,
                                std::vector<std::int32_t> seq_ids, std::int32_t n_nodes);
};

} // namespace esp
