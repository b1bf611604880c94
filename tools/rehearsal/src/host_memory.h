// SPDX-License-Identifier: Apache-2.0
// Host memory that the card can reach: pinned allocations and registrations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "memory.h"

namespace rehearsal {

// `owned`: allocated here, so private, anonymous, and zero until written.
struct HostRegion {
  uintptr_t base;
  size_t size;
  bool owned;
};

Result host_allocate(void** address, size_t size);
Result host_free(void* address);
Result host_register(void* address, size_t size);
Result host_unregister(void* address);
std::optional<HostRegion> host_region_at(uintptr_t address);

}  // namespace rehearsal
