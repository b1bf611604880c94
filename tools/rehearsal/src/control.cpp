// SPDX-License-Identifier: Apache-2.0
// What a program on a simulated card may ask and do: the C functions behind
// tools/rehearsal/card.py. Also the report at exit.
#include <cstring>
#include <string>

#include "card.h"
#include "config.h"
#include "front.h"
#include "ledger.h"
#include "memory.h"
#include "streams.h"

using namespace rehearsal;

EXPORT size_t rehearsal_used(int device) { return card(device).used(); }
EXPORT size_t rehearsal_peak(int device, int reset) {
  return card(device).peak(reset != 0);
}
EXPORT size_t rehearsal_free(int device) { return card(device).free(); }
EXPORT uint64_t rehearsal_refusals(int device) {
  return card(device).refusals();
}
// Ballast, and what other programs on the card would take. 0: done.
EXPORT int rehearsal_take(int device, size_t bytes) {
  return card(device).take(bytes) ? 0 : 1;
}
EXPORT void rehearsal_give(int device, size_t bytes) {
  card(device).give(bytes);
}
// 0: done. 1: a context exists already.
EXPORT int rehearsal_resize(size_t bytes) { return resize_cards(bytes) ? 0 : 1; }

EXPORT void rehearsal_fail(const char* call, uint64_t nth, int code,
                           int and_later) {
  inject_fault(call, nth, code, and_later != 0);
}
EXPORT void rehearsal_clear_faults() { clear_faults(); }
EXPORT uint64_t rehearsal_faults_fired() { return faults_fired(); }
EXPORT uint64_t rehearsal_calls(const char* call) { return calls_of(call); }
EXPORT uint64_t rehearsal_misuse() { return misuse_total(); }

// Writes the report, cut to `length` with its final zero; returns the length
// that it needs without it.
EXPORT size_t rehearsal_report(char* out, size_t length) {
  std::string text = report();
  if (length != 0) {
    size_t cut = text.size() < length ? text.size() : length - 1;
    std::memcpy(out, text.data(), cut);
    out[cut] = '\0';
  }
  return text.size();
}

// For a program that leaves with _exit.
EXPORT void rehearsal_write_report() { write_report(); }

__attribute__((destructor)) static void report_at_exit() { write_report(); }
