// SPDX-License-Identifier: Apache-2.0
#include "ledger.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <vector>

#include "config.h"
#include "memory.h"
#include "card.h"

namespace rehearsal {
namespace {

struct Fault {
  std::string name;
  uint64_t remaining;
  int code;
  bool and_later;
};

constexpr size_t kExamples = 20;
constexpr int kOutOfMemory = 2;
constexpr int kUnknownError = 999;

struct Ledger {
  std::mutex mutex;
  std::atomic<CallSite*> sites{nullptr};
  std::vector<RehearsalStub*> stubs;
  std::map<std::string, uint64_t> misuse;
  std::vector<std::string> examples;
  std::vector<Fault> faults;
  std::atomic<bool> faults_armed{false};
  std::atomic<uint64_t> faults_fired{0};
  std::atomic<uint64_t> skipped{0};
};

void arm_from_environment(Ledger& ledger) {
  std::istringstream list(config().faults);
  std::string item;
  while (std::getline(list, item, ',')) {
    size_t colon = item.find(':');
    std::string name = item.substr(0, colon);
    uint64_t nth = 1;
    bool and_later = false;
    if (colon != std::string::npos) {
      std::string number = item.substr(colon + 1);
      and_later = !number.empty() && number.back() == '+';
      nth = std::strtoull(number.c_str(), nullptr, 10);
    }
    if (name.empty() || nth == 0) {
      std::fprintf(stderr,
                   "rehearsal: REHEARSAL_FAULTS: '%s' is not NAME:N or "
                   "NAME:N+ with N from 1\n",
                   item.c_str());
      std::_Exit(2);
    }
    ledger.faults.push_back({name, nth, 0, and_later});
  }
  ledger.faults_armed = !ledger.faults.empty();
}

Ledger& ledger() {
  static Ledger* l = [] {
    auto* fresh = new Ledger;
    arm_from_environment(*fresh);
    return fresh;
  }();
  return *l;
}

bool allocates(const std::string& name) {
  for (const char* part : {"Alloc", "Malloc", "MemCreate", "Reserve"}) {
    if (name.find(part) != std::string::npos) return true;
  }
  return false;
}

int fault_for(const char* name) {
  Ledger& l = ledger();
  std::lock_guard<std::mutex> lock(l.mutex);
  for (auto it = l.faults.begin(); it != l.faults.end(); ++it) {
    if (it->name != name || --it->remaining != 0) continue;
    int code = it->code;
    if (code == 0) code = allocates(it->name) ? kOutOfMemory : kUnknownError;
    if (it->and_later) {
      it->remaining = 1;
    } else {
      l.faults.erase(it);
      l.faults_armed = !l.faults.empty();
    }
    ++l.faults_fired;
    return code;
  }
  return 0;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

class JsonObject {
 public:
  template <typename Number>
  void number(const std::string& key, Number value) {
    add(key, std::to_string(value));
  }
  void add(const std::string& key, const std::string& json) {
    text_ += (text_.empty() ? "{" : ",") + quoted(key) + ":" + json;
  }
  std::string end() const { return text_.empty() ? "{}" : text_ + "}"; }

 private:
  std::string text_;
};

std::string cards_json() {
  std::string text = "[";
  for (int device = 0; device < config().cards; ++device) {
    Card& c = card(device);
    JsonObject one;
    one.number("memory", config().memory);
    one.number("used", c.used());
    one.number("peak", c.peak(false));
    one.number("refusals", c.refusals());
    one.number("launches", c.launches());
    text += (device != 0 ? "," : "") + one.end();
  }
  return text + "]";
}

std::string memory_json() {
  MemoryCensus census = memory_census();
  JsonObject out;
  out.number("allocations", census.allocations);
  out.number("handles", census.handles);
  out.number("unreachable_handles", census.unreachable_handles);
  out.number("mappings", census.mappings);
  out.number("reservations", census.reservations);
  out.number("committed", census.committed);
  return out.end();
}

}  // namespace

CallSite::CallSite(const char* name) : name_(name) {
  auto& head = ledger().sites;
  next_ = head.load();
  while (!head.compare_exchange_weak(next_, this)) {
  }
}

int CallSite::enter() {
  count_.fetch_add(1, std::memory_order_relaxed);
  if (!ledger().faults_armed.load(std::memory_order_relaxed)) return 0;
  return fault_for(name_);
}

void inject_fault(const std::string& name, uint64_t nth, int code,
                  bool and_later) {
  Ledger& l = ledger();
  std::lock_guard<std::mutex> lock(l.mutex);
  l.faults.push_back({name, nth, code, and_later});
  l.faults_armed = true;
}

void clear_faults() {
  Ledger& l = ledger();
  std::lock_guard<std::mutex> lock(l.mutex);
  l.faults.clear();
  l.faults_armed = false;
}

uint64_t faults_fired() { return ledger().faults_fired; }

void note_misuse(const char* kind, const char* call, uintptr_t address) {
  Ledger& l = ledger();
  std::lock_guard<std::mutex> lock(l.mutex);
  ++l.misuse[kind];
  if (l.examples.size() >= kExamples) return;
  char line[200];
  std::snprintf(line, sizeof line, "%s: %s of %#zx", kind, call, address);
  l.examples.push_back(line);
}

uint64_t misuse_count(const char* kind) {
  Ledger& l = ledger();
  std::lock_guard<std::mutex> lock(l.mutex);
  auto it = l.misuse.find(kind);
  return it == l.misuse.end() ? 0 : it->second;
}

uint64_t misuse_total() {
  Ledger& l = ledger();
  std::lock_guard<std::mutex> lock(l.mutex);
  uint64_t total = 0;
  for (const auto& [kind, count] : l.misuse) total += count;
  return total;
}

void note_skipped_copy(uint64_t bytes) { ledger().skipped += bytes; }

uint64_t skipped_copy_bytes() { return ledger().skipped; }

uint64_t calls_of(const char* name) {
  uint64_t total = 0;
  for (const CallSite* s = ledger().sites.load(); s != nullptr; s = s->next()) {
    if (std::strcmp(s->name(), name) == 0) total += s->count();
  }
  return total;
}

uint64_t unsupported_total() {
  Ledger& l = ledger();
  std::lock_guard<std::mutex> lock(l.mutex);
  uint64_t total = 0;
  for (const RehearsalStub* s : l.stubs) {
    if (s->harmless == 0) total += __atomic_load_n(&s->count, __ATOMIC_RELAXED);
  }
  return total;
}

std::string report() {
  std::map<std::string, uint64_t> calls;
  for (const CallSite* s = ledger().sites.load(); s != nullptr; s = s->next()) {
    if (s->count() != 0) calls[s->name()] += s->count();
  }
  JsonObject out, by_name, harmless, unsupported, misuse;
  for (const auto& [name, count] : calls) by_name.number(name, count);
  std::string examples = "[";
  {
    Ledger& l = ledger();
    std::lock_guard<std::mutex> lock(l.mutex);
    for (const RehearsalStub* s : l.stubs) {
      (s->harmless != 0 ? harmless : unsupported).number(s->name, s->count);
    }
    for (const auto& [kind, count] : l.misuse) misuse.number(kind, count);
    for (const std::string& line : l.examples) {
      examples += (examples.size() > 1 ? "," : "") + quoted(line);
    }
  }
  out.number("process", getpid());
  out.add("name", quoted(config().name));
  out.add("cards", cards_json());
  out.add("memory", memory_json());
  out.add("misuse", misuse.end());
  out.add("misuse_examples", examples + "]");
  out.add("unsupported", unsupported.end());
  out.add("harmless", harmless.end());
  out.add("calls", by_name.end());
  out.number("faults_fired", faults_fired());
  out.number("skipped_copy_bytes", skipped_copy_bytes());
  return out.end();
}

void write_report() {
  std::string path = config().report;
  if (path.empty()) return;
  size_t at = path.find("%p");
  if (at != std::string::npos) path.replace(at, 2, std::to_string(getpid()));
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (file == nullptr) {
    std::fprintf(stderr, "rehearsal: cannot write the report %s: %s\n",
                 path.c_str(), std::strerror(errno));
    return;
  }
  std::string text = report();
  std::fwrite(text.data(), 1, text.size(), file);
  std::fputc('\n', file);
  std::fclose(file);
}

}  // namespace rehearsal

extern "C" int rehearsal_stub(RehearsalStub* stub) {
  if (__atomic_fetch_add(&stub->count, 1, __ATOMIC_RELAXED) == 0) {
    auto& l = rehearsal::ledger();
    std::lock_guard<std::mutex> lock(l.mutex);
    l.stubs.push_back(stub);
  }
  return stub->code;
}
