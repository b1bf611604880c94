// SPDX-License-Identifier: Apache-2.0
#include "modules.h"

#include <cuda.h>

#include <cstring>
#include <mutex>
#include <unordered_map>

#include "config.h"
#include "context.h"
#include "memory.h"

namespace rehearsal {
namespace {

constexpr size_t kUnknownSize = 65536;

struct Table {
  std::mutex mutex;
  std::unordered_map<const void*, ModuleVariable> by_symbol;
  std::unordered_map<std::string, ModuleVariable> by_name;
};

Table& table() {
  static Table* t = new Table;
  return *t;
}

ModuleVariable filled(ModuleVariable& v) {
  if (v.size == 0) v.size = kUnknownSize;
  if (v.address == 0) {
    allocate(&v.address, v.size, current_device(), /*charged=*/false);
  }
  return v;
}

}  // namespace

void register_variable(const void* host_symbol, size_t size) {
  Table& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  t.by_symbol[host_symbol] = {0, size};
}

ModuleVariable variable_of(const void* host_symbol) {
  Table& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  auto it = t.by_symbol.find(host_symbol);
  if (it == t.by_symbol.end()) return {0, 0};
  return filled(it->second);
}

ModuleVariable variable_by_name(const std::string& name) {
  Table& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  return filled(t.by_name[name]);
}

int kernel_attribute(int attribute) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      return 1024;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      return 32;
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
      return config().major * 10 + config().minor;
    default:
      return 0;
  }
}

void device_uuid(int device, char bytes[16]) {
  std::memcpy(bytes, "rehearsal-card-0", 16);
  bytes[15] = static_cast<char>('0' + device);
}

}  // namespace rehearsal
