// SPDX-License-Identifier: Apache-2.0
#include "contents.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "config.h"

namespace rehearsal {
namespace {

constexpr uint64_t kFileSize = uint64_t{16} << 40;
constexpr size_t kBitmapSize = kFileSize / Contents::kChunk / 8;

[[noreturn]] void die(const char* what) {
  std::perror(what);
  std::_Exit(2);
}

}  // namespace

Contents::Contents() : offsets_(0, kFileSize) {
  file_ = memfd_create("rehearsal", MFD_CLOEXEC);
  if (file_ < 0 || ftruncate(file_, kFileSize) != 0) {
    die("rehearsal: no file for the contents of the card");
  }
  void* bits = mmap(nullptr, kBitmapSize, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (bits == MAP_FAILED) die("rehearsal: no table of committed memory");
  bits_ = static_cast<std::atomic<uint64_t>*>(bits);
}

uint64_t Contents::take(size_t size) {
  auto offset = offsets_.take(size, kChunk);
  if (!offset) die("rehearsal: more than 16 TiB of physical memory");
  return *offset;
}

void Contents::give(uint64_t offset, size_t size) {
  drop(offset, size);
  offsets_.give(offset, size);
}

bool Contents::map(uintptr_t address, size_t size, uint64_t offset) {
  void* at = reinterpret_cast<void*>(address);
  return mmap(at, size, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
              file_, static_cast<off_t>(offset)) == at;
}

bool Contents::allow_access(uintptr_t address, size_t size) {
  return mprotect(reinterpret_cast<void*>(address), size,
                  PROT_READ | PROT_WRITE) == 0;
}

bool Contents::unmap(uintptr_t address, size_t size) {
  void* at = reinterpret_cast<void*>(address);
  return mmap(at, size, PROT_NONE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
              0) == at;
}

bool Contents::is_committed(uint64_t offset) const {
  uint64_t chunk = offset / kChunk;
  return (bits_[chunk / 64].load(std::memory_order_acquire) >> chunk % 64) & 1;
}

bool Contents::commit(uint64_t offset) {
  if (is_committed(offset)) return true;
  if ((committed_ + 1) * kChunk > config().commit_limit) return false;
  uint64_t chunk = offset / kChunk, bit = uint64_t{1} << chunk % 64;
  if ((bits_[chunk / 64].fetch_or(bit) & bit) == 0) ++committed_;
  return true;
}

bool Contents::clear_bits(uint64_t offset, size_t size) {
  bool any = false;
  for (uint64_t c = offset / kChunk; c < (offset + size) / kChunk; ++c) {
    auto& word = bits_[c / 64];
    if (c % 64 == 0 && word.load(std::memory_order_relaxed) == 0) {
      c += 63;
      continue;
    }
    uint64_t bit = uint64_t{1} << c % 64;
    if ((word.fetch_and(~bit) & bit) != 0) {
      --committed_;
      any = true;
    }
  }
  return any;
}

void Contents::drop(uint64_t offset, size_t size) {
  // The hole is punched even where no chunk was committed: host code may
  // have written through the address itself.
  clear_bits(offset, size);
  if (fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                static_cast<off_t>(offset), static_cast<off_t>(size)) != 0) {
    die("rehearsal: cannot drop the contents of released memory");
  }
}

}  // namespace rehearsal
