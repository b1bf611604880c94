// SPDX-License-Identifier: Apache-2.0
#include "host_memory.h"

#include <sys/mman.h>

#include <iterator>
#include <map>
#include <mutex>

#include "card.h"
#include "ledger.h"

namespace rehearsal {
namespace {

constexpr size_t kPage = 4096;

struct HostTable {
  std::mutex mutex;
  std::map<uintptr_t, HostRegion> regions;

  bool overlaps(uintptr_t base, size_t size) {
    auto after = regions.lower_bound(base);
    if (after != regions.end() && after->first < base + size) return true;
    if (after == regions.begin()) return false;
    auto before = std::prev(after);
    return before->first + before->second.size > base;
  }
};

HostTable& table() {
  static HostTable* t = new HostTable;
  return *t;
}

uintptr_t number(const void* address) {
  return reinterpret_cast<uintptr_t>(address);
}

}  // namespace

Result host_allocate(void** address, size_t size) {
  size = round_up(size == 0 ? 1 : size, kPage);
  void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return kOutOfMemory;
  HostTable& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  t.regions[number(at)] = {number(at), size, true};
  *address = at;
  return kSuccess;
}

Result host_free(void* address) {
  HostTable& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  auto it = t.regions.find(number(address));
  if (it == t.regions.end() || !it->second.owned) {
    note_misuse("double_host_free", "cudaFreeHost", number(address));
    return kInvalidValue;
  }
  munmap(address, it->second.size);
  t.regions.erase(it);
  return kSuccess;
}

Result host_register(void* address, size_t size) {
  if (address == nullptr || size == 0) return kInvalidValue;
  HostTable& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  if (t.overlaps(number(address), size)) return kHostAlreadyRegistered;
  t.regions[number(address)] = {number(address), size, false};
  return kSuccess;
}

Result host_unregister(void* address) {
  HostTable& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  auto it = t.regions.find(number(address));
  if (it == t.regions.end() || it->second.owned) {
    note_misuse("unregister_of_unregistered", "cudaHostUnregister",
                number(address));
    return kHostNotRegistered;
  }
  t.regions.erase(it);
  return kSuccess;
}

std::optional<HostRegion> host_region_at(uintptr_t address) {
  HostTable& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  auto it = t.regions.upper_bound(address);
  if (it == t.regions.begin()) return std::nullopt;
  --it;
  if (address >= it->first + it->second.size) return std::nullopt;
  return it->second;
}

}  // namespace rehearsal
