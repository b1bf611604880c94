// SPDX-License-Identifier: Apache-2.0
// Every call that the cards answered, every misuse, and the faults to inject.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace rehearsal {

// One function of a front library that is written by hand. Counts its calls
// and says when this one must fail.
class CallSite {
 public:
  explicit CallSite(const char* name);

  // 0, or the error code that an injected fault asks for.
  int enter();

  const char* name() const { return name_; }
  uint64_t count() const { return count_.load(std::memory_order_relaxed); }
  const CallSite* next() const { return next_; }

 private:
  const char* name_;
  std::atomic<uint64_t> count_{0};
  CallSite* next_ = nullptr;
};

// The `nth` call from now on of the function called `name` fails with `code`
// (0: the code that fits the function). `and_later`: all after it as well.
void inject_fault(const std::string& name, uint64_t nth, int code,
                  bool and_later);
void clear_faults();
uint64_t faults_fired();

// `kind` is a name in lower case with underscores: "double_free".
void note_misuse(const char* kind, const char* call, uintptr_t address);
uint64_t misuse_count(const char* kind);
uint64_t misuse_total();

// Bytes of copies that the limit on contents made us skip.
void note_skipped_copy(uint64_t bytes);
uint64_t skipped_copy_bytes();

uint64_t calls_of(const char* name);
uint64_t unsupported_total();

// The whole ledger with the state of the cards, as a JSON object.
std::string report();
// Writes report() to config().report, if that is set.
void write_report();

}  // namespace rehearsal

extern "C" {

// A generated function: one whose work may be left out, or an unsupported one.
struct RehearsalStub {
  const char* name;
  const char* library;
  int harmless;
  int code;
  uint64_t count;
  RehearsalStub* next;
};

int rehearsal_stub(RehearsalStub* stub);
}
