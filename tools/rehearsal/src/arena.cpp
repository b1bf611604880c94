// SPDX-License-Identifier: Apache-2.0
#include "arena.h"

#include <iterator>

namespace rehearsal {

std::optional<uint64_t> Ranges::take(uint64_t size, uint64_t alignment) {
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    uint64_t start = it->first, end = start + it->second;
    uint64_t at = (start + alignment - 1) / alignment * alignment;
    if (at + size > end || at + size < at) continue;
    free_.erase(it);
    if (at > start) free_[start] = at - start;
    if (at + size < end) free_[at + size] = end - at - size;
    return at;
  }
  return std::nullopt;
}

void Ranges::give(uint64_t start, uint64_t size) {
  auto here = free_.emplace(start, size).first;
  auto after = std::next(here);
  if (after != free_.end() && here->first + here->second == after->first) {
    here->second += after->second;
    free_.erase(after);
  }
  if (here == free_.begin()) return;
  auto before = std::prev(here);
  if (before->first + before->second == here->first) {
    before->second += here->second;
    free_.erase(here);
  }
}

}  // namespace rehearsal
