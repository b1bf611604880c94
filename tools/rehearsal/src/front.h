// SPDX-License-Identifier: Apache-2.0
// What the front libraries share.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "ledger.h"

namespace rehearsal {

// For ABI objects that only have to exist: never read, freed by their owner.
inline void* opaque_object(size_t size = 64) { return std::calloc(1, size); }

template <typename Pointer>
uintptr_t address_of(Pointer pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

}  // namespace rehearsal

// Counts this call, and returns early when a fault was injected for it.
#define REHEARSAL_CALL(name, type)                       \
  do {                                                   \
    static rehearsal::CallSite site(name);               \
    if (int code = site.enter()) return type(code);      \
  } while (false)

#define EXPORT extern "C" __attribute__((visibility("default")))
