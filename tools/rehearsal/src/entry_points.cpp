// SPDX-License-Identifier: Apache-2.0
#include "entry_points.h"

#include <string>
#include <unordered_map>
#include <vector>

extern "C" __attribute__((visibility("default"))) void*
rehearsal_find_entry_point(const char* name, int version) {
  using Entries = std::vector<const RehearsalEntryPoint*>;
  static const auto* by_name = [] {
    auto* map = new std::unordered_map<std::string, Entries>;
    for (const auto* e = rehearsal_entry_points; e->name != nullptr; ++e) {
      (*map)[e->name].push_back(e);  // in order of `since`
    }
    return map;
  }();
  auto found = by_name->find(name);
  if (found == by_name->end()) return nullptr;
  const Entries& entries = found->second;
  void* best = nullptr;
  for (const auto* e : entries) {
    if (best == nullptr || version == 0 || e->since <= version) {
      best = e->function;
    }
  }
  return best;
}
