// SPDX-License-Identifier: Apache-2.0
// The segments that exist, and who may do what to one of them. Knows nothing of
// the driver or of Python.
//
// One mutex guards everything here. It is a leaf: no function below calls out
// of this file while it holds it, so no order of locks can be wrong.
#pragma once

#include "leftovers.h"

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace cumem {

// A range of device addresses, with physical memory behind it unless asleep.
struct Segment {
  int device = 0;
  std::uint64_t size = 0;  // bytes, a multiple of the granularity
  std::uint64_t address = 0;
  std::uint64_t handle = 0;  // of the physical memory; 0 while asleep
  const std::string* tag = nullptr;
  std::int64_t generation = 0;
  std::uint64_t serial = 0;  // never given twice
  bool asleep = false;

  // How many users need it to exist; a free waits for the last of them.
  int held = 0;
  // Its physical memory is being taken away or put back.
  bool changing = false;
  // my_free was called: gone for everyone but those who hold it.
  bool freed = false;
  // The freeing thread left the release to the last holder.
  bool postponed = false;
};

struct Counters {
  std::uint64_t mapped_bytes = 0;
  std::uint64_t peak_mapped_bytes = 0;
  std::uint64_t reserved_bytes = 0;
  std::uint64_t returned_bytes = 0;  // by frees of mapped segments, ever
  std::uint64_t segments = 0;
  std::uint64_t mallocs = 0;
  std::uint64_t frees = 0;
  std::uint64_t failed_mallocs = 0;
  std::uint64_t errors = 0;
  std::uint64_t leftovers = 0;
};

inline std::string hexadecimal(std::uint64_t address) {
  char text[2 + 16 + 1];
  std::snprintf(text, sizeof(text), "0x%llx",
                static_cast<unsigned long long>(address));
  return text;
}

class SegmentTable {
 public:
  // Errors kept until someone takes them; older ones are dropped first.
  static constexpr std::size_t kMaxErrors = 256;

  // A copy of `name` that lives as long as the process.
  const std::string* intern(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    return &*names_.insert(name).first;
  }

  // Adds a mapped segment and gives it its serial.
  void add(Segment* segment) {
    std::lock_guard<std::mutex> lock(mutex_);
    segment->serial = ++last_serial_;
    segments_[segment->address] = *segment;
    counters_.mallocs += 1;
    counters_.segments += 1;
    counters_.reserved_bytes += segment->size;
    count_mapped(segment->size);
  }

  void count_failed_malloc() {
    std::lock_guard<std::mutex> lock(mutex_);
    counters_.failed_mallocs += 1;
  }

  // Freeing, step 1: takes the segment out of everyone's sight but its
  // holders'. Nothing when there is none or it was freed before.
  std::optional<Segment> claim_for_free(std::uint64_t address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = segments_.find(address);
    if (found == segments_.end() || found->second.freed) return std::nullopt;
    found->second.freed = true;
    counters_.frees += 1;
    counters_.segments -= 1;
    return found->second;
  }

  // Step 2: the segment as it is now, to be released by the caller; or nothing
  // when it is held, and the last holder releases it.
  std::optional<Segment> release_or_postpone(std::uint64_t address) {
    std::lock_guard<std::mutex> lock(mutex_);
    Segment& segment = segments_.at(address);
    if (segment.held == 0) return segment;
    segment.postponed = true;
    return std::nullopt;
  }

  // Step 3: takes it off the books; what it had is the caller's to give back.
  // Nothing when an earlier mapping is still at its addresses, which then go
  // together with that.
  std::optional<Leftover> forget(std::uint64_t address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = segments_.find(address);
    const Segment& segment = found->second;
    if (!segment.asleep) {
      counters_.mapped_bytes -= segment.size;
      counters_.returned_bytes += segment.size;
    }
    counters_.reserved_bytes -= segment.size;
    const Leftover left{segment.device,  segment.size,   address,
                        !segment.asleep, segment.handle, true};
    segments_.erase(found);
    if (Leftover* const earlier = leftovers_.mapped_at(address)) {
      earlier->reserved = true;
      counters_.reserved_bytes += earlier->size;
      return std::nullopt;
    }
    return count_leftover(left);
  }

  // True, and held once more, if the segment still exists and is that one.
  bool hold(std::uint64_t address, std::uint64_t serial) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = segments_.find(address);
    if (found == segments_.end()) return false;
    Segment& segment = found->second;
    if (segment.freed || segment.serial != serial) return false;
    segment.held += 1;
    return true;
  }

  // False when nobody holds it. `release` receives the segment when it was
  // freed meanwhile and the caller was its last holder.
  bool unhold(std::uint64_t address, std::optional<Segment>* release) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = segments_.find(address);
    // A change holds the segment too, and that hold is not the caller's.
    if (found == segments_.end() ||
        found->second.held - (found->second.changing ? 1 : 0) <= 0) {
      return false;
    }
    drop_hold(&found->second, release);
    return true;
  }

  // Starts to put a segment to sleep or to wake it, and holds it until
  // `end_change`. Returns why not; empty when started.
  std::string begin_change(std::uint64_t address, std::uint64_t size,
                           int device, bool asleep_now, Segment* segment) {
    std::unique_lock<std::mutex> lock(mutex_);
    // Another thread may be about to get rid of an earlier mapping there.
    offer_ended_.wait(lock, [this, address] {
      const Leftover* const earlier = leftovers_.mapped_at(address);
      return earlier == nullptr || !earlier->offered || earlier->reserved;
    });
    auto found = segments_.find(address);
    if (found == segments_.end() ||
        (found->second.freed && found->second.held == 0)) {
      return "no segment starts at " + hexadecimal(address) +
             "; it was never allocated here, or it was freed";
    }
    Segment& entry = found->second;
    const std::string name = "the segment at " + hexadecimal(address);
    if (entry.size != size || entry.device != device) {
      return name + " has " + std::to_string(entry.size) + " bytes on device " +
             std::to_string(entry.device) + ", not " + std::to_string(size) +
             " on device " + std::to_string(device);
    }
    if (entry.changing) return name + " is in use by another thread";
    if (entry.asleep != asleep_now) {
      return name + (asleep_now ? " is mapped already" : " is asleep already");
    }
    if (asleep_now && leftovers_.mapped_at(address)) {
      return name +
             " cannot be woken yet: the driver has refused to undo an "
             "earlier mapping there; try again later";
    }
    entry.changing = true;
    entry.held += 1;
    *segment = entry;
    return {};
  }

  // Ends a change with the state that it led to. As with `unhold`, the caller
  // may have to release the segment.
  void end_change(std::uint64_t address, bool asleep, std::uint64_t handle,
                  std::optional<Segment>* release) {
    std::lock_guard<std::mutex> lock(mutex_);
    Segment& segment = segments_.at(address);
    if (segment.asleep && !asleep) count_mapped(segment.size);
    if (!segment.asleep && asleep) counters_.mapped_bytes -= segment.size;
    segment.asleep = asleep;
    segment.handle = handle;
    segment.changing = false;
    drop_hold(&segment, release);
  }

  // Notes something that the caller is about to give back.
  Leftover add_leftover(const Leftover& left) {
    std::lock_guard<std::mutex> lock(mutex_);
    return count_leftover(left);
  }

  // What the driver has refused before and no thread is offering to it now.
  std::vector<std::uint64_t> idle_leftovers() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return leftovers_.idle();
  }

  // Starts to offer one of them again; nothing when another thread was faster.
  std::optional<Leftover> take_leftover(std::uint64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Leftover* const left = leftovers_.take(id);
    return left ? std::optional<Leftover>(*left) : std::nullopt;
  }

  // Notes what the driver has taken of the memory. True when the addresses are
  // the caller's to free now; they are off the books before that, as the driver
  // may hand them out again at once.
  bool settle_memory(const Leftover& offered) {
    std::lock_guard<std::mutex> lock(mutex_);
    Leftover& left = leftovers_.at(offered.id);
    if (left.mapped && !offered.mapped) counters_.mapped_bytes -= left.size;
    left.mapped = offered.mapped;
    left.handle = offered.handle;
    if (left.mapped || !left.reserved) return false;
    left.reserved = false;
    counters_.reserved_bytes -= left.size;
    return true;
  }

  // Ends an offer, with the addresses back on the books if they were refused.
  void end_offer(std::uint64_t id, bool addresses_refused) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (addresses_refused) {
        Leftover& left = leftovers_.at(id);
        left.reserved = true;
        counters_.reserved_bytes += left.size;
      }
      leftovers_.put_back(id);
    }
    offer_ended_.notify_all();
  }

  // The segments that nobody freed, in order of address.
  std::vector<Segment> snapshot() const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Segment> segments;
    segments.reserve(segments_.size());
    for (const auto& [address, segment] : segments_) {
      if (!segment.freed) segments.push_back(segment);
    }
    return segments;
  }

  Counters counters() const {
    std::lock_guard<std::mutex> lock(mutex_);
    Counters now = counters_;
    now.leftovers = leftovers_.count_refused();
    return now;
  }

  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    counters_.peak_mapped_bytes = counters_.mapped_bytes;
  }

  void latch(std::string error) {
    std::lock_guard<std::mutex> lock(mutex_);
    counters_.errors += 1;
    if (errors_.size() == kMaxErrors) errors_.pop_front();
    errors_.push_back(std::move(error));
  }

  std::deque<std::string> take_errors() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(errors_, {});
  }

 private:
  void count_mapped(std::uint64_t size) {
    counters_.mapped_bytes += size;
    counters_.peak_mapped_bytes =
        std::max(counters_.peak_mapped_bytes, counters_.mapped_bytes);
  }

  Leftover count_leftover(const Leftover& left) {
    if (left.mapped) count_mapped(left.size);
    if (left.reserved) counters_.reserved_bytes += left.size;
    return leftovers_.add(left);
  }

  static void drop_hold(Segment* segment, std::optional<Segment>* release) {
    segment->held -= 1;
    if (segment->held == 0 && segment->postponed) *release = *segment;
  }

  mutable std::mutex mutex_;
  std::condition_variable offer_ended_;
  std::map<std::uint64_t, Segment> segments_;  // by address
  Leftovers leftovers_;
  std::set<std::string> names_;
  std::deque<std::string> errors_;
  Counters counters_;
  std::uint64_t last_serial_ = 0;
};

}  // namespace cumem
