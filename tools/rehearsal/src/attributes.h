// SPDX-License-Identifier: Apache-2.0
// What a card of the configured capability says about itself.
#pragma once

#include <cstddef>

namespace rehearsal {

// CUdevice_attribute and cudaDeviceAttr share their numbers. Unknown: 0.
int device_attribute(int attribute, int device);
int max_threads_per_multiprocessor();
size_t l2_cache_bytes();

// Resident blocks of `threads` threads on one multiprocessor.
int resident_blocks(int threads);

}  // namespace rehearsal
