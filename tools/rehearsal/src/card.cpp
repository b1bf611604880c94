// SPDX-License-Identifier: Apache-2.0
#include "card.h"

#include <algorithm>

#include "config.h"

namespace rehearsal {

bool Card::take_locked(size_t bytes) {
  const Config& c = config();
  if (c.reserved + used_ + bytes > c.memory) {
    ++refusals_;
    return false;
  }
  used_ += bytes;
  peak_ = std::max(peak_, used_);
  return true;
}

bool Card::take(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  return take_locked(bytes);
}

void Card::give(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  used_ -= bytes;
}

bool Card::open_context() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!context_) context_ = take_locked(config().context);
  return context_;
}

bool Card::has_context() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return context_;
}

void Card::launch() {
  std::lock_guard<std::mutex> lock(mutex_);
  // A real driver that cannot load the code fails the launch; here the
  // shortage shows at the next allocation, which is where loads fail.
  if (launches_++ == 0) {
    used_ += config().first_launch;
    peak_ = std::max(peak_, used_);
  }
}

size_t Card::used() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

size_t Card::free() const {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t taken = config().reserved + used_;
  return taken < config().memory ? config().memory - taken : 0;
}

size_t Card::peak(bool reset) {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t highest = peak_;
  if (reset) peak_ = used_;
  return highest;
}

uint64_t Card::refusals() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return refusals_;
}

uint64_t Card::launches() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return launches_;
}

Card& card(int device) {
  static Card* cards = new Card[16];
  return cards[device];
}

bool device_exists(int device) {
  return device >= 0 && device < config().cards;
}

}  // namespace rehearsal
