// SPDX-License-Identifier: Apache-2.0
// Copies and fills, done at once on the calling thread. They are real while
// contents() has room; what does not fit is skipped and counted.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory.h"

namespace rehearsal {

// Either end may be device or host memory. kIllegalAddress, and a misuse in
// the ledger, when a device end is not mapped and accessible throughout.
Result copy(const char* call, uintptr_t to, uintptr_t from, size_t size);

// `pattern` of `width` bytes (1, 2 or 4), `count` times.
Result fill(const char* call, uintptr_t to, uint32_t pattern, size_t width,
            size_t count);

}  // namespace rehearsal
