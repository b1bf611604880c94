// SPDX-License-Identifier: Apache-2.0
// How full each card is. Bytes only: addresses and contents are in memory.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

namespace rehearsal {

constexpr size_t kGranularity = size_t{2} << 20;

constexpr size_t round_up(size_t n, size_t unit) {
  return (n + unit - 1) / unit * unit;
}

class Card {
 public:
  // Takes `bytes` of the card, or refuses and counts the refusal.
  bool take(size_t bytes);
  void give(size_t bytes);

  // The first use of a card pays for its context, the first kernel for what
  // the driver loads then. False: the card has no room for it.
  bool open_context();
  bool has_context() const;
  void launch();

  size_t used() const;
  size_t free() const;
  // Highest use since the start, or since the last call with `reset`.
  size_t peak(bool reset);
  uint64_t refusals() const;
  uint64_t launches() const;

  // For fork handlers.
  std::mutex& mutex() { return mutex_; }

 private:
  bool take_locked(size_t bytes);

  mutable std::mutex mutex_;
  size_t used_ = 0;
  size_t peak_ = 0;
  uint64_t refusals_ = 0;
  uint64_t launches_ = 0;
  bool context_ = false;
};

// `device` must be below config().cards.
Card& card(int device);
bool device_exists(int device);

}  // namespace rehearsal
