// SPDX-License-Identifier: Apache-2.0
// Device memory: address reservations, physical handles, mappings, and plain
// allocations, which are all three at once. Results are CUresult values; the
// runtime's error codes are the same numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace rehearsal {

enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kHostAlreadyRegistered = 712,
  kHostNotRegistered = 713,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureUnmatched = 903,
  kUnknown = 999,
};

constexpr int kHostMemory = -1;  // as the device of a handle

// Bytes must be a multiple of the granularity. `device` may be kHostMemory,
// which no card pays for.
Result create_handle(uint64_t* handle, size_t size, int device);
Result release_handle(uint64_t handle);
Result retain_handle(uint64_t* handle, uintptr_t address);
Result handle_device(uint64_t handle, int* device);

Result reserve_addresses(uintptr_t* address, size_t size, size_t alignment);
Result free_addresses(uintptr_t address, size_t size);

Result map_handle(uintptr_t address, size_t size, size_t offset,
                  uint64_t handle);
Result set_access(uintptr_t address, size_t size);
Result unmap_range(uintptr_t address, size_t size);

// `charged`: false for what the calibration constants already pay for.
Result allocate(uintptr_t* address, size_t size, int device,
                bool charged = true);
Result free_allocation(uintptr_t address);

// One mapping; of a plain allocation, all of it.
struct Region {
  uintptr_t base;
  size_t size;
  int device;
  bool accessible;
  uint64_t offset;  // of `base` in the contents
};
std::optional<Region> region_at(uintptr_t address);
// The reservation or allocation that an address lies in.
std::optional<Region> reservation_at(uintptr_t address);
// Whether an address could only be a device address, mapped or not.
bool is_device_address(uintptr_t address);

struct MemoryCensus {
  uint64_t allocations = 0;
  uint64_t handles = 0;
  uint64_t unreachable_handles = 0;  // held by the program, mapped nowhere
  uint64_t mappings = 0;             // of the virtual-memory calls
  uint64_t reservations = 0;         // of the virtual-memory calls
  uint64_t committed = 0;            // bytes of host memory
};
MemoryCensus memory_census();

class Contents;
Contents& contents();

}  // namespace rehearsal
