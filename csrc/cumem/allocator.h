// SPDX-License-Identifier: Apache-2.0
// Allocating, freeing, putting to sleep and waking segments. Takes no lock over
// a call to the driver and knows nothing of Python.
#pragma once

#include "physical_memory.h"
#include "segment_table.h"

#include <atomic>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

namespace cumem {

// Never destroyed: see open_driver().
inline SegmentTable& table() {
  static auto* const segments = new SegmentTable;
  return *segments;
}

// What the calling thread's next segments are labelled with. Plain data, so
// that it can be read until the last moment of a thread.
struct Scope {
  const std::string* tag = nullptr;
  std::int64_t generation = 0;
};

inline Scope& scope() {
  thread_local Scope current;
  return current;
}

inline const std::string* scope_tag() {
  static const std::string* const fallback = table().intern("default");
  return scope().tag ? scope().tag : fallback;
}

// Told of each segment that appears, and of each that is about to go.
struct Observer {
  void (*allocated)(const Segment& segment);
  void (*freeing)(std::uint64_t address);
};

inline std::atomic<const Observer*>& observer() {
  static std::atomic<const Observer*> current{nullptr};
  return current;
}

inline std::string bytes_on_device(std::uint64_t size, int device) {
  return std::to_string(size) + " bytes on device " + std::to_string(device);
}

// Reports a failure that the caller cannot be told of. Nothing is printed: out
// of memory is a normal answer to PyTorch, which frees its cache and asks
// again.
inline void latch(const std::string& what, const Status& status) {
  // After the driver has shut down, at the end of the process, there is nothing
  // left that could be released.
  if (status.ok() || status.driver_is_gone()) return;
  table().latch(what + ": " + status.text());
}

// Offers each part of it to the driver once. What the driver refuses is kept,
// to be offered again.
inline Status give_back(Leftover left) {
  Status status;
  const auto took = [&status](const Status& answer) {
    status.also(answer);
    return answer.ok() || answer.driver_is_gone();
  };
  if (left.mapped) {
    left.mapped = !took(CUMEM_CALL(cuMemUnmap, left.address, left.size));
  }
  // Released even if it is mapped: the memory then goes with its last mapping.
  if (left.handle != 0 && took(CUMEM_CALL(cuMemRelease, left.handle))) {
    left.handle = 0;
  }
  // Addresses that are still mapped must not be handed out again.
  bool refused = false;
  if (table().settle_memory(left)) {
    refused = !took(CUMEM_CALL(cuMemAddressFree, left.address, left.size));
  }
  table().end_offer(left.id, refused);
  return status;
}

// Enough to get on when the driver is well again, and a bound on what each call
// costs when it never is.
constexpr int kMaxRefusals = 8;

// Offers the driver once more what it refused before, until it refuses again
// too often. Says nothing: each refusal was reported when it first came.
inline void offer_leftovers() {
  int refusals = 0;
  for (const std::uint64_t id : table().idle_leftovers()) {
    const std::optional<Leftover> left = table().take_leftover(id);
    if (!left) continue;
    DeviceScope working_on(left->device);
    Status status = working_on.status();
    if (status.ok()) {
      status = give_back(*left);
    } else {
      table().end_offer(id, false);
    }
    if (!status.ok() && ++refusals == kMaxRefusals) return;
  }
}

// The same for a call from PyTorch, which may come while it captures `stream`.
inline void offer_leftovers_unless_capturing(CUstream stream) {
  if (table().idle_leftovers().empty()) return;
  bool capturing = false;
  if (ask_capturing(stream, &capturing).ok() && !capturing) offer_leftovers();
}

// Fills in address, size and handle. On failure all is given back.
inline Status build_segment(std::int64_t size, CUstream stream,
                            Segment* segment) {
  if (!driver().missing.empty()) {
    return Status::refused("there is no CUDA driver: " + driver().missing);
  }
  if (size <= 0) return Status::refused("the size must be positive");
  DeviceScope device(segment->device);
  if (!device.status().ok()) return device.status();
  offer_leftovers_unless_capturing(stream);
  const DeviceTraits* traits = nullptr;
  Status status = device_traits(segment->device, &traits);
  if (!status.ok()) return status;
  const std::uint64_t granularity = traits->granularity;
  const std::uint64_t wanted = static_cast<std::uint64_t>(size);
  segment->size = (wanted + granularity - 1) / granularity * granularity;
  CUdeviceptr address = 0;
  status = CUMEM_CALL(cuMemAddressReserve, &address, segment->size, 0, 0, 0);
  if (!status.ok()) return status;
  Handle handle = 0;
  bool mapped = false;
  status = map_memory(*traits, address, segment->size, &handle, &mapped);
  if (!status.ok()) {
    status.also(give_back(table().add_leftover(
        {segment->device, segment->size, address, mapped, handle, true})));
    return status;
  }
  segment->address = address;
  segment->handle = handle;
  return status;
}

// A new mapped segment of at least `size` bytes; nullptr, and a latched error,
// when there is none to be had.
inline void* allocate(std::int64_t size, int device, CUstream stream) noexcept {
  Segment segment;
  segment.device = device;
  segment.tag = scope_tag();
  segment.generation = scope().generation;
  const Status status = build_segment(size, stream, &segment);
  if (!status.ok()) {
    table().count_failed_malloc();
    latch("my_malloc of " + std::to_string(size) + " bytes on device " +
              std::to_string(device),
          status);
    return nullptr;
  }
  table().add(&segment);
  if (const Observer* told = observer().load(std::memory_order_acquire)) {
    told->allocated(segment);
  }
  return reinterpret_cast<void*>(segment.address);
}

// Gives a freed segment back, as much of it as the driver takes.
inline Status release_segment(const Segment& segment) {
  const std::optional<Leftover> left = table().forget(segment.address);
  return left ? give_back(*left) : Status();
}

inline std::string free_of(const Segment& segment) {
  return "my_free of the segment at " + hexadecimal(segment.address) + ", " +
         bytes_on_device(segment.size, segment.device);
}

// Releases a segment whose free was postponed until its last holder let go.
inline void release_postponed(const std::optional<Segment>& segment) {
  if (!segment) return;
  DeviceScope device(segment->device);
  Status status = device.status();
  status.also(release_segment(*segment));
  latch(free_of(*segment), status);
}

// Frees the segment at `pointer`. `stream` is the one that it was allocated
// for.
inline void deallocate(void* pointer, CUstream stream) noexcept {
  const auto address = reinterpret_cast<std::uint64_t>(pointer);
  std::optional<Segment> segment = table().claim_for_free(address);
  if (!segment) {
    table().latch("my_free: no segment starts at " + hexadecimal(address) +
                  "; it was never allocated here, or it was freed before");
    return;
  }
  if (const Observer* told = observer().load(std::memory_order_acquire)) {
    told->freeing(address);
  }
  const std::string what = free_of(*segment);
  DeviceScope device(segment->device);
  Status status = device.status();
  // Before the question whether it is held: the last holder may come long after
  // the stream has been destroyed.
  if (!segment->asleep && status.ok()) status = wait_for_users(stream);
  if (device.status().ok()) offer_leftovers_unless_capturing(stream);
  segment = table().release_or_postpone(address);
  if (segment) status.also(release_segment(*segment));
  latch(what, status);
}

inline std::string wanted(const Segment& segment) {
  return ": wanted " + bytes_on_device(segment.size, segment.device);
}

// Puts fresh physical memory behind a segment that is asleep. On failure it is
// asleep as before.
inline Status wake_segment(int device, std::uint64_t size,
                           std::uint64_t address) {
  offer_leftovers();
  Segment segment;
  const std::string refusal =
      table().begin_change(address, size, device, true, &segment);
  if (!refusal.empty()) return Status::refused(refusal);
  Handle handle = 0;
  bool mapped = false;
  Status status;
  std::optional<Segment> postponed;
  {
    DeviceScope working_on(device);
    const DeviceTraits* traits = nullptr;
    status = working_on.status();
    if (status.ok()) status = device_traits(device, &traits);
    if (status.ok()) {
      status = map_memory(*traits, address, size, &handle, &mapped);
    }
    const bool asleep = !status.ok();
    if (handle != 0 && asleep) {
      status.also(give_back(table().add_leftover(
          {device, size, address, mapped, handle, false})));
    }
    table().end_change(address, asleep, asleep ? 0 : handle, &postponed);
  }
  release_postponed(postponed);
  return std::move(status).with(wanted(segment));
}

// Takes the physical memory from a mapped segment and keeps its addresses. If
// the driver refuses the unmap, the segment stays mapped.
inline Status put_segment_to_sleep(int device, std::uint64_t size,
                                   std::uint64_t address) {
  offer_leftovers();
  Segment segment;
  const std::string refusal =
      table().begin_change(address, size, device, false, &segment);
  if (!refusal.empty()) return Status::refused(refusal);
  Status status;
  std::optional<Segment> postponed;
  {
    DeviceScope working_on(device);
    status = working_on.status();
    if (status.ok()) status = CUMEM_CALL(cuMemUnmap, address, size);
    const bool asleep = status.ok();
    if (asleep) {
      status = give_back(table().add_leftover(
          {device, size, address, false, segment.handle, false}));
    }
    table().end_change(address, asleep, asleep ? 0 : segment.handle,
                       &postponed);
  }
  release_postponed(postponed);
  return std::move(status).with(": unmapping " +
                                bytes_on_device(segment.size, segment.device));
}

// False when nobody holds the segment. The last holder releases it if it was
// freed meanwhile; the holder's own work on it must be over.
inline bool unhold_segment(std::uint64_t address) {
  std::optional<Segment> postponed;
  const bool held = table().unhold(address, &postponed);
  release_postponed(postponed);
  return held;
}

}  // namespace cumem
