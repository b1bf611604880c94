// SPDX-License-Identifier: Apache-2.0
#include "context.h"

#include <atomic>
#include <vector>

#include "card.h"
#include "config.h"

namespace rehearsal {
namespace {

std::atomic<bool> initialized{false};

constexpr uintptr_t kFirst = 0x7c0000001000, kStep = 0x1000;

std::vector<void*>& stack() {
  thread_local std::vector<void*> contexts;
  return contexts;
}

}  // namespace

void initialize() { initialized = true; }
bool is_initialized() { return initialized; }

void* primary_context(int device) {
  return reinterpret_cast<void*>(kFirst + device * kStep);
}

int context_device(void* context) {
  uintptr_t at = reinterpret_cast<uintptr_t>(context);
  if (at < kFirst || (at - kFirst) % kStep != 0) return -1;
  int device = static_cast<int>((at - kFirst) / kStep);
  return device_exists(device) ? device : -1;
}

void* current_context() { return stack().empty() ? nullptr : stack().back(); }

void set_current_context(void* context) {
  if (!stack().empty()) stack().pop_back();
  if (context != nullptr) stack().push_back(context);
}

void push_context(void* context) { stack().push_back(context); }

Result pop_context(void** context) {
  if (stack().empty()) return kInvalidContext;
  if (context != nullptr) *context = stack().back();
  stack().pop_back();
  return kSuccess;
}

int current_device() {
  int device = context_device(current_context());
  return device < 0 ? 0 : device;
}

Result set_current_device(int device) {
  if (!device_exists(device)) return kInvalidDevice;
  initialize();
  if (!card(device).open_context()) return kOutOfMemory;
  set_current_context(primary_context(device));
  return kSuccess;
}

Result ensure_context() {
  if (current_context() != nullptr) return kSuccess;
  return set_current_device(0);
}

}  // namespace rehearsal
