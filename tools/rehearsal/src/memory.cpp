// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>

#include "arena.h"
#include "card.h"
#include "config.h"
#include "contents.h"
#include "ledger.h"

namespace rehearsal {
namespace {

constexpr uint64_t kAddresses = uint64_t{16} << 40;
constexpr uint64_t kAlignment = uint64_t{1} << 30;

struct Physical {
  size_t size;
  int device;
  uint64_t offset;
  uint64_t held;    // references that the program holds
  uint64_t mapped;  // mappings
  bool charged;
};

struct Mapping {
  size_t size;
  uint64_t handle;
  size_t offset;
  bool accessible;
};

struct Reservation {
  size_t size;
  bool allocation;  // made by allocate(), freed by free_allocation()
};

class Memory {
 public:
  Memory() : addresses_(reserve_host_addresses(), kAddresses) {}

  Result create(uint64_t* handle, size_t size, int device, bool charged);
  Result release(uint64_t handle);
  Result retain(uint64_t* handle, uintptr_t address);
  Result device_of(uint64_t handle, int* device);
  Result reserve(uintptr_t* address, size_t size, size_t alignment,
                 bool allocation);
  Result free_reservation(uintptr_t address, size_t size);
  Result map(uintptr_t address, size_t size, size_t offset, uint64_t handle);
  Result set_access(uintptr_t address, size_t size);
  Result unmap(uintptr_t address, size_t size, const char* call);
  Result allocate(uintptr_t* address, size_t size, int device, bool charged);
  Result free_allocation(uintptr_t address);

  std::optional<Region> region_at(uintptr_t address);
  std::optional<Region> reservation_at(uintptr_t address);
  bool owns(uintptr_t address) const {
    return address >= base_ && address < base_ + kAddresses;
  }
  MemoryCensus census();

  std::mutex mutex;
  Contents contents;

 private:
  uint64_t reserve_host_addresses();
  void drop_if_unused(uint64_t handle);
  // Whole mappings that cover [address, address + size) without a gap.
  bool covered(uintptr_t address, size_t size);
  std::map<uintptr_t, Reservation>::iterator around(uintptr_t address);

  uint64_t base_ = 0;
  Ranges addresses_;
  std::map<uintptr_t, Reservation> reservations_;
  std::map<uintptr_t, Mapping> mappings_;
  std::unordered_map<uint64_t, Physical> handles_;
  uint64_t next_handle_ = 0x5000;
};

Memory& memory() {
  static Memory* m = [] {
    auto* fresh = new Memory;
    // A child must not inherit a lock that another thread held.
    pthread_atfork([] { memory().mutex.lock(); },
                   [] { memory().mutex.unlock(); },
                   [] { memory().mutex.unlock(); });
    return fresh;
  }();
  return *m;
}

uint64_t Memory::reserve_host_addresses() {
  void* at = mmap(nullptr, kAddresses + kAlignment, PROT_NONE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) {
    std::perror("rehearsal: cannot reserve 16 TiB of addresses");
    std::_Exit(2);
  }
  base_ = round_up(reinterpret_cast<uintptr_t>(at), kAlignment);
  return base_;
}

bool aligned(uint64_t n) { return n % kGranularity == 0; }

Result Memory::create(uint64_t* handle, size_t size, int device,
                      bool charged) {
  if (size == 0 || !aligned(size)) return kInvalidValue;
  charged = charged && device != kHostMemory;
  if (charged && !card(device).take(size)) return kOutOfMemory;
  uint64_t offset = contents.take(size);
  *handle = next_handle_;
  next_handle_ += 16;
  handles_[*handle] = {size, device, offset, 1, 0, charged};
  return kSuccess;
}

void Memory::drop_if_unused(uint64_t handle) {
  auto it = handles_.find(handle);
  const Physical& p = it->second;
  if (p.held != 0 || p.mapped != 0) return;
  contents.give(p.offset, p.size);
  if (p.charged) card(p.device).give(p.size);
  handles_.erase(it);
}

Result Memory::release(uint64_t handle) {
  auto it = handles_.find(handle);
  if (it == handles_.end() || it->second.held == 0) {
    note_misuse("double_release", "cuMemRelease", handle);
    return kInvalidValue;
  }
  --it->second.held;
  drop_if_unused(handle);
  return kSuccess;
}

Result Memory::retain(uint64_t* handle, uintptr_t address) {
  auto it = mappings_.upper_bound(address);
  if (it == mappings_.begin()) return kInvalidValue;
  --it;
  if (address >= it->first + it->second.size) return kInvalidValue;
  *handle = it->second.handle;
  ++handles_[*handle].held;
  return kSuccess;
}

Result Memory::device_of(uint64_t handle, int* device) {
  auto it = handles_.find(handle);
  if (it == handles_.end()) return kInvalidValue;
  *device = it->second.device;
  return kSuccess;
}

Result Memory::reserve(uintptr_t* address, size_t size, size_t alignment,
                       bool allocation) {
  if (size == 0 || !aligned(size)) return kInvalidValue;
  if ((alignment & (alignment - 1)) != 0) return kInvalidValue;
  auto at = addresses_.take(size, std::max(alignment, kGranularity));
  if (!at) return kOutOfMemory;
  reservations_[*at] = {size, allocation};
  *address = *at;
  return kSuccess;
}

Result Memory::free_reservation(uintptr_t address, size_t size) {
  auto it = reservations_.find(address);
  if (it == reservations_.end() || it->second.size != size ||
      it->second.allocation) {
    note_misuse("free_of_unknown_addresses", "cuMemAddressFree", address);
    return kInvalidValue;
  }
  auto inside = mappings_.lower_bound(address);
  if (inside != mappings_.end() && inside->first < address + size) {
    note_misuse("free_of_mapped_addresses", "cuMemAddressFree", address);
    return kInvalidValue;
  }
  reservations_.erase(it);
  addresses_.give(address, size);
  return kSuccess;
}

std::map<uintptr_t, Reservation>::iterator Memory::around(uintptr_t address) {
  auto it = reservations_.upper_bound(address);
  if (it == reservations_.begin()) return reservations_.end();
  --it;
  return address < it->first + it->second.size ? it : reservations_.end();
}

Result Memory::map(uintptr_t address, size_t size, size_t offset,
                   uint64_t handle) {
  auto physical = handles_.find(handle);
  if (physical == handles_.end() || physical->second.held == 0) {
    note_misuse("map_of_released_handle", "cuMemMap", handle);
    return kInvalidValue;
  }
  Physical& p = physical->second;
  if (size == 0 || !aligned(size) || !aligned(address) || !aligned(offset)) {
    return kInvalidValue;
  }
  if (offset + size > p.size) return kInvalidValue;
  auto reservation = around(address);
  if (reservation == reservations_.end() ||
      address + size > reservation->first + reservation->second.size) {
    note_misuse("map_outside_reservation", "cuMemMap", address);
    return kInvalidValue;
  }
  auto after = mappings_.lower_bound(address);
  bool taken = after != mappings_.end() && after->first < address + size;
  if (after != mappings_.begin()) {
    auto before = std::prev(after);
    taken = taken || before->first + before->second.size > address;
  }
  if (taken) {
    note_misuse("map_of_mapped_range", "cuMemMap", address);
    return kInvalidValue;
  }
  if (!contents.map(address, size, p.offset + offset)) return kOutOfMemory;
  mappings_[address] = {size, handle, offset, false};
  ++p.mapped;
  return kSuccess;
}

bool Memory::covered(uintptr_t address, size_t size) {
  uintptr_t at = address;
  while (at < address + size) {
    auto it = mappings_.find(at);
    if (it == mappings_.end()) return false;
    at += it->second.size;
  }
  return at == address + size;
}

Result Memory::set_access(uintptr_t address, size_t size) {
  if (size == 0 || !covered(address, size)) {
    note_misuse("access_to_unmapped_range", "cuMemSetAccess", address);
    return kInvalidValue;
  }
  if (!contents.allow_access(address, size)) return kOutOfMemory;
  for (auto it = mappings_.find(address);
       it != mappings_.end() && it->first < address + size; ++it) {
    it->second.accessible = true;
  }
  return kSuccess;
}

Result Memory::unmap(uintptr_t address, size_t size, const char* call) {
  if (size == 0 || !covered(address, size)) {
    note_misuse("unmap_of_unmapped_range", call, address);
    return kInvalidValue;
  }
  if (!contents.unmap(address, size)) return kUnknown;
  auto it = mappings_.find(address);
  while (it != mappings_.end() && it->first < address + size) {
    uint64_t handle = it->second.handle;
    it = mappings_.erase(it);
    --handles_[handle].mapped;
    drop_if_unused(handle);
  }
  return kSuccess;
}

Result Memory::allocate(uintptr_t* address, size_t size, int device,
                        bool charged) {
  size = round_up(size, kGranularity);
  uint64_t handle = 0;
  Result result = create(&handle, size, device, charged);
  if (result != kSuccess) return result;
  result = reserve(address, size, kGranularity, true);
  if (result == kSuccess) {
    result = map(*address, size, 0, handle);
    if (result == kSuccess) {
      result = set_access(*address, size);
    } else {
      reservations_.erase(*address);
      addresses_.give(*address, size);
    }
  }
  // From here the mapping alone keeps the memory.
  release(handle);
  return result;
}

Result Memory::free_allocation(uintptr_t address) {
  auto it = reservations_.find(address);
  if (it == reservations_.end() || !it->second.allocation) {
    note_misuse("double_free", "cuMemFree", address);
    return kInvalidValue;
  }
  size_t size = it->second.size;
  Result result = unmap(address, size, "cuMemFree");
  if (result != kSuccess) return result;
  reservations_.erase(it);
  addresses_.give(address, size);
  return kSuccess;
}

std::optional<Region> Memory::region_at(uintptr_t address) {
  auto it = mappings_.upper_bound(address);
  if (it == mappings_.begin()) return std::nullopt;
  --it;
  const Mapping& m = it->second;
  if (address >= it->first + m.size) return std::nullopt;
  const Physical& p = handles_[m.handle];
  return Region{it->first, m.size, p.device, m.accessible,
                p.offset + m.offset};
}

std::optional<Region> Memory::reservation_at(uintptr_t address) {
  auto it = around(address);
  if (it == reservations_.end()) return std::nullopt;
  return Region{it->first, it->second.size, 0, false, 0};
}

MemoryCensus Memory::census() {
  MemoryCensus c;
  for (const auto& [address, r] : reservations_) {
    ++(r.allocation ? c.allocations : c.reservations);
  }
  for (const auto& [handle, p] : handles_) {
    ++c.handles;
    if (p.mapped == 0) ++c.unreachable_handles;
  }
  // Plain allocations are a handle and a mapping inside; not the program's.
  c.mappings = mappings_.size() - c.allocations;
  c.handles -= c.allocations;
  c.committed = contents.committed_bytes();
  return c;
}

using Lock = std::lock_guard<std::mutex>;

}  // namespace

Result create_handle(uint64_t* handle, size_t size, int device) {
  Lock lock(memory().mutex);
  return memory().create(handle, size, device, true);
}

Result release_handle(uint64_t handle) {
  Lock lock(memory().mutex);
  return memory().release(handle);
}

Result retain_handle(uint64_t* handle, uintptr_t address) {
  Lock lock(memory().mutex);
  return memory().retain(handle, address);
}

Result handle_device(uint64_t handle, int* device) {
  Lock lock(memory().mutex);
  return memory().device_of(handle, device);
}

Result reserve_addresses(uintptr_t* address, size_t size, size_t alignment) {
  Lock lock(memory().mutex);
  return memory().reserve(address, size, alignment, false);
}

Result free_addresses(uintptr_t address, size_t size) {
  Lock lock(memory().mutex);
  return memory().free_reservation(address, size);
}

Result map_handle(uintptr_t address, size_t size, size_t offset,
                  uint64_t handle) {
  Lock lock(memory().mutex);
  return memory().map(address, size, offset, handle);
}

Result set_access(uintptr_t address, size_t size) {
  Lock lock(memory().mutex);
  return memory().set_access(address, size);
}

Result unmap_range(uintptr_t address, size_t size) {
  Lock lock(memory().mutex);
  return memory().unmap(address, size, "cuMemUnmap");
}

Result allocate(uintptr_t* address, size_t size, int device, bool charged) {
  Lock lock(memory().mutex);
  return memory().allocate(address, size, device, charged);
}

Result free_allocation(uintptr_t address) {
  Lock lock(memory().mutex);
  return memory().free_allocation(address);
}

std::optional<Region> region_at(uintptr_t address) {
  Lock lock(memory().mutex);
  return memory().region_at(address);
}

std::optional<Region> reservation_at(uintptr_t address) {
  Lock lock(memory().mutex);
  return memory().reservation_at(address);
}

bool is_device_address(uintptr_t address) { return memory().owns(address); }

MemoryCensus memory_census() {
  Lock lock(memory().mutex);
  return memory().census();
}

Contents& contents() { return memory().contents; }

}  // namespace rehearsal
