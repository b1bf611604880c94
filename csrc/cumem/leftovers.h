// SPDX-License-Identifier: Apache-2.0
// What the driver still has of segments that are gone: on its way back, or
// refused and to be offered again. Knows nothing of the driver. It has no lock
// of its own; the segment table's mutex guards it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace cumem {

struct Leftover {
  int device = 0;
  std::uint64_t size = 0;  // bytes
  std::uint64_t address = 0;
  bool mapped = false;
  std::uint64_t handle = 0;  // 0 once released
  // The addresses go too. False while a segment that is asleep has them.
  bool reserved = false;
  std::uint64_t id = 0;

  // A thread is offering it to the driver; no other may.
  bool offered = false;
  // The driver has refused some of it before.
  bool refused = false;

  bool empty() const { return !mapped && handle == 0 && !reserved; }
};

class Leftovers {
 public:
  // Adds one in the hands of the calling thread.
  const Leftover& add(Leftover left) {
    left.id = ++last_id_;
    left.offered = true;
    return entries_[left.id] = left;
  }

  // Puts an idle one into the hands of the calling thread; nullptr when it is
  // gone or in the hands of another.
  const Leftover* take(std::uint64_t id) {
    auto found = entries_.find(id);
    if (found == entries_.end() || found->second.offered) return nullptr;
    found->second.offered = true;
    return &found->second;
  }

  Leftover& at(std::uint64_t id) { return entries_.at(id); }

  // Ends an offer: drops what is empty, and lines the rest up behind the others
  // under a new id.
  void put_back(std::uint64_t id) {
    auto entry = entries_.extract(id);
    Leftover& left = entry.mapped();
    if (left.empty()) return;
    left.offered = false;
    left.refused = true;
    left.id = entry.key() = ++last_id_;
    entries_.insert(std::move(entry));
  }

  // The one that is still mapped at `address`, if any.
  Leftover* mapped_at(std::uint64_t address) {
    for (auto& [id, left] : entries_) {
      if (left.mapped && left.address == address) return &left;
    }
    return nullptr;
  }

  // Those that no thread is offering, the longest waiting first.
  std::vector<std::uint64_t> idle() const {
    std::vector<std::uint64_t> ids;
    for (const auto& [id, left] : entries_) {
      if (!left.offered) ids.push_back(id);
    }
    return ids;
  }

  std::size_t count_refused() const {
    return static_cast<std::size_t>(
        std::count_if(entries_.begin(), entries_.end(),
                      [](const auto& entry) { return entry.second.refused; }));
  }

 private:
  std::map<std::uint64_t, Leftover> entries_;  // by id
  std::uint64_t last_id_ = 0;
};

}  // namespace cumem
