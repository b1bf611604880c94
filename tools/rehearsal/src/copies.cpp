// SPDX-License-Identifier: Apache-2.0
#include "copies.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "card.h"
#include "contents.h"
#include "host_memory.h"
#include "ledger.h"

namespace rehearsal {
namespace {

constexpr size_t kChunk = Contents::kChunk;
constexpr size_t kPage = 4096;

char* bytes_at(uintptr_t address) { return reinterpret_cast<char*>(address); }

bool all_zero(const char* data, size_t size) {
  return size == 0 ||
         (data[0] == 0 && std::memcmp(data, data + 1, size - 1) == 0);
}

// The device end of a copy, walked from mapping to mapping.
class DeviceEnd {
 public:
  explicit DeviceEnd(uintptr_t address) : address_(address) {}

  bool check(const char* call, size_t size) {
    for (uintptr_t at = address_; at < address_ + size;) {
      auto region = region_at(at);
      if (!region || !region->accessible) {
        note_misuse(region ? "use_before_access" : "use_of_unmapped_memory",
                    call, at);
        return false;
      }
      at = region->base + region->size;
    }
    return true;
  }

  // Offset in the contents; `left` is cut at the end of the chunk.
  uint64_t offset(uintptr_t at, size_t* left) {
    if (at - region_.base >= region_.size) {
      // Unmapped since the check: another thread's error, a harmless answer.
      region_ = region_at(at).value_or(Region{at, kChunk, 0, false, 0});
    }
    uint64_t offset = region_.offset + (at - region_.base);
    *left = std::min(*left, region_.base + region_.size - at);
    *left = std::min(*left, kChunk - offset % kChunk);
    return offset;
  }

 private:
  uintptr_t address_;
  Region region_{};  // none: size 0
};

// Zeros for the chunk at `offset`: a whole one is given back instead.
void zero_device(uintptr_t to, uint64_t offset, size_t size) {
  if (!contents().is_committed(offset)) return;
  if (size == kChunk) {
    contents().drop(offset, size);
  } else {
    std::memset(bytes_at(to), 0, size);
  }
}

bool write_device(uintptr_t to, uint64_t offset, const char* data,
                  size_t size) {
  if (!contents().commit(offset)) {
    note_skipped_copy(size);
    return false;
  }
  std::memcpy(bytes_at(to), data, size);
  return true;
}

// Zeros where there are none yet. What is zero already is only read, so that
// backing up an empty model takes no host memory.
void zero_untouched(uintptr_t to, size_t size) {
  while (size != 0) {
    size_t piece = std::min(size, kPage - to % kPage);
    if (!all_zero(bytes_at(to), piece)) std::memset(bytes_at(to), 0, piece);
    to += piece, size -= piece;
  }
}

// Pinned memory of our own is returned to its zero state instead of written.
void zero_host(uintptr_t to, size_t size) {
  auto region = host_region_at(to);
  uintptr_t first = round_up(to, kPage), last = (to + size) / kPage * kPage;
  if (!region || !region->owned || first >= last) {
    zero_untouched(to, size);
    return;
  }
  std::memset(bytes_at(to), 0, first - to);
  madvise(bytes_at(first), last - first, MADV_DONTNEED);
  std::memset(bytes_at(last), 0, to + size - last);
}

void copy_to_device(DeviceEnd to_end, uintptr_t to, uintptr_t from,
                    size_t size, DeviceEnd* from_end) {
  while (size != 0) {
    size_t piece = size;
    uint64_t to_offset = to_end.offset(to, &piece);
    bool zero;
    if (from_end != nullptr) {
      uint64_t from_offset = from_end->offset(from, &piece);
      zero = !contents().is_committed(from_offset);
    } else {
      zero = all_zero(bytes_at(from), piece);
    }
    if (zero) {
      zero_device(to, to_offset, piece);
    } else {
      write_device(to, to_offset, bytes_at(from), piece);
    }
    to += piece, from += piece, size -= piece;
  }
}

void copy_to_host(uintptr_t to, DeviceEnd from_end, uintptr_t from,
                  size_t size) {
  while (size != 0) {
    size_t run = 0;  // of zeros, as long as possible
    size_t piece = size;
    bool committed = false;
    while (run < size) {
      piece = size - run;
      uint64_t offset = from_end.offset(from + run, &piece);
      committed = contents().is_committed(offset);
      if (committed) break;
      run += piece;
    }
    if (run != 0) zero_host(to, run);
    to += run, from += run, size -= run;
    if (!committed) continue;
    std::memcpy(bytes_at(to), bytes_at(from), piece);
    to += piece, from += piece, size -= piece;
  }
}

}  // namespace

Result copy(const char* call, uintptr_t to, uintptr_t from, size_t size) {
  if (size == 0) return kSuccess;
  bool to_device = is_device_address(to), from_device = is_device_address(from);
  DeviceEnd to_end(to), from_end(from);
  if (to_device && !to_end.check(call, size)) return kIllegalAddress;
  if (from_device && !from_end.check(call, size)) return kIllegalAddress;
  if (to_device) {
    copy_to_device(to_end, to, from, size, from_device ? &from_end : nullptr);
  } else if (from_device) {
    copy_to_host(to, from_end, from, size);
  } else {
    std::memmove(bytes_at(to), bytes_at(from), size);
  }
  return kSuccess;
}

Result fill(const char* call, uintptr_t to, uint32_t pattern, size_t width,
            size_t count) {
  size_t size = width * count;
  if (size == 0) return kSuccess;
  if (!is_device_address(to)) {
    // Pinned host memory, through its device address.
    for (size_t i = 0; i < size; i += width) {
      std::memcpy(bytes_at(to) + i, &pattern, width);
    }
    return kSuccess;
  }
  DeviceEnd end(to);
  if (!end.check(call, size)) return kIllegalAddress;
  char repeated[256];
  for (size_t i = 0; i < sizeof repeated; i += width) {
    std::memcpy(repeated + i, &pattern, width);
  }
  bool zero = all_zero(repeated, sizeof repeated);
  while (size != 0) {
    size_t piece = size;
    uint64_t offset = end.offset(to, &piece);
    if (zero) {
      zero_device(to, offset, piece);
    } else {
      // Chunks start at multiples of every width: the phase stays right.
      for (size_t done = 0; done < piece;) {
        size_t part = std::min(piece - done, sizeof repeated);
        if (!write_device(to + done, offset + done, repeated, part)) {
          note_skipped_copy(piece - done - part);
          break;
        }
        done += part;
      }
    }
    to += piece, size -= piece;
  }
  return kSuccess;
}

}  // namespace rehearsal
