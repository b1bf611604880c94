// SPDX-License-Identifier: Apache-2.0
#include "config.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "card.h"

namespace rehearsal {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kGiB = size_t{1} << 30;

[[noreturn]] void refuse(const char* variable, const char* value,
                         const char* wanted) {
  std::fprintf(stderr, "rehearsal: %s=%s is not %s\n", variable, value, wanted);
  std::_Exit(2);
}

const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

size_t whole_number(const char* name, size_t otherwise) {
  const char* text = variable(name);
  if (text == nullptr) return otherwise;
  char* end = nullptr;
  errno = 0;
  unsigned long long value = std::strtoull(text, &end, 10);
  if (errno != 0 || *end != '\0' || *text == '-') {
    refuse(name, text, "a whole number");
  }
  return value;
}

std::string text(const char* name, const char* otherwise) {
  const char* value = variable(name);
  return value != nullptr ? value : otherwise;
}

Config read_environment() {
  Config c;
  c.name = text("REHEARSAL_CARD_NAME", "Simulated card");
  std::string capability = text("REHEARSAL_CAPABILITY", "9.0");
  if (std::sscanf(capability.c_str(), "%d.%d", &c.major, &c.minor) != 2) {
    refuse("REHEARSAL_CAPABILITY", capability.c_str(),
           "a compute capability such as 9.0");
  }
  c.cards = static_cast<int>(whole_number("REHEARSAL_CARDS", 1));
  if (c.cards < 1 || c.cards > 16) {
    refuse("REHEARSAL_CARDS", text("REHEARSAL_CARDS", "").c_str(),
           "between 1 and 16");
  }
  c.multiprocessors =
      static_cast<int>(whole_number("REHEARSAL_MULTIPROCESSORS", 100));
  c.memory = whole_number("REHEARSAL_MEMORY", 16 * kGiB);
  c.reserved = whole_number("REHEARSAL_RESERVED", 0);
  c.context = whole_number("REHEARSAL_CONTEXT", 512 * kMiB);
  c.first_launch = whole_number("REHEARSAL_FIRST_LAUNCH", 0);
  c.communicator = whole_number("REHEARSAL_COMMUNICATOR", 0);
  c.commit_limit = whole_number("REHEARSAL_COMMIT_LIMIT", 2 * kGiB);
  c.faults = text("REHEARSAL_FAULTS", "");
  c.report = text("REHEARSAL_REPORT", "");
  return c;
}

Config& mutable_config() {
  static Config* c = new Config(read_environment());
  return *c;
}

}  // namespace

const Config& config() { return mutable_config(); }

bool resize_cards(size_t memory) {
  for (int device = 0; device < config().cards; ++device) {
    if (card(device).has_context()) return false;
  }
  mutable_config().memory = memory;
  return true;
}

}  // namespace rehearsal
