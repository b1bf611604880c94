// SPDX-License-Identifier: Apache-2.0
// The library for LD_AUDIT: whoever asks for a CUDA library that we have a
// front for, by name, by RPATH or by full path, gets the front. Preloading is
// not enough: an RPATH, as torch has, wins over it.
//
// It lives in a namespace of its own with its own libc: no C++ library here.
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern "C" __attribute__((visibility("default"))) unsigned la_version(
    unsigned version) {
  return version < LAV_CURRENT ? version : LAV_CURRENT;
}

extern "C" __attribute__((visibility("default"))) char* la_objsearch(
    const char* name, uintptr_t*, unsigned) {
  const char* folder = getenv("REHEARSAL_LIBRARIES");
  const char* slash = strrchr(name, '/');
  const char* file = slash != nullptr ? slash + 1 : name;
  if (folder == nullptr || strncmp(file, "lib", 3) != 0) {
    return const_cast<char*>(name);
  }
  // The loader copies the answer before it asks again on this thread.
  static thread_local char answer[4096];
  int length = snprintf(answer, sizeof answer, "%s/%s", folder, file);
  if (length >= static_cast<int>(sizeof answer) || access(answer, R_OK) != 0) {
    return const_cast<char*>(name);
  }
  return answer;
}
