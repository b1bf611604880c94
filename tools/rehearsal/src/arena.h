// SPDX-License-Identifier: Apache-2.0
// Ranges of a large number line, first fit: device addresses, and offsets in
// the file that holds the contents of physical memory. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

namespace rehearsal {

class Ranges {
 public:
  Ranges(uint64_t start, uint64_t size) { free_[start] = size; }

  // The lowest free range of `size` at a multiple of `alignment`.
  std::optional<uint64_t> take(uint64_t size, uint64_t alignment);
  void give(uint64_t start, uint64_t size);

 private:
  std::map<uint64_t, uint64_t> free_;  // start -> size, never adjacent
};

}  // namespace rehearsal
