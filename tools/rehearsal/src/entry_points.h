// SPDX-License-Identifier: Apache-2.0
// Driver functions by the name that cuGetProcAddress takes. The table itself
// is generated from cuda.h and cudaTypedefs.h.
#pragma once

struct RehearsalEntryPoint {
  const char* name;
  int since;  // CUDA version from which this ABI is meant, as 12030
  void* function;
};

extern "C" const RehearsalEntryPoint rehearsal_entry_points[];

// The newest ABI that `version` knows of; null: no such name.
extern "C" void* rehearsal_find_entry_point(const char* name, int version);

inline void* find_entry_point(const char* name, int version) {
  return rehearsal_find_entry_point(name, version);
}
