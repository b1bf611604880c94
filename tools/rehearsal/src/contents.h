// SPDX-License-Identifier: Apache-2.0
// What physical memory holds: a sparse file in host memory. Only chunks that
// somebody wrote something other than zeros to take host memory, and only up
// to a limit.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "arena.h"

namespace rehearsal {

class Contents {
 public:
  static constexpr size_t kChunk = size_t{64} << 10;

  Contents();

  // Offset in the file of `size` bytes of new physical memory, all zero.
  uint64_t take(size_t size);
  // Its contents are dropped.
  void give(uint64_t offset, size_t size);

  // Makes the file appear at `address`, without access / with / not at all.
  bool map(uintptr_t address, size_t size, uint64_t offset);
  bool allow_access(uintptr_t address, size_t size);
  bool unmap(uintptr_t address, size_t size);

  bool is_committed(uint64_t offset) const;
  // Room for the contents of the chunk at `offset`. False: over the limit.
  bool commit(uint64_t offset);
  // Whole chunks become zero again.
  void drop(uint64_t offset, size_t size);

  uint64_t committed_bytes() const { return committed_ * kChunk; }

 private:
  bool clear_bits(uint64_t offset, size_t size);

  int file_;
  Ranges offsets_;
  std::atomic<uint64_t>* bits_;
  std::atomic<uint64_t> committed_{0};
};

}  // namespace rehearsal
