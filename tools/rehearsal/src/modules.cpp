// SPDX-License-Identifier: Apache-2.0
#include "modules.h"

#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "config.h"
#include "context.h"
#include "memory.h"

namespace rehearsal {
namespace {

constexpr size_t kUnknownSize = 65536;

// The container that nvcc embeds, for what it says of architectures.
struct FatBinary {
  uint32_t magic;
  uint16_t version;
  uint16_t header_size;
  uint64_t size;  // of all entries
};
struct FatBinaryEntry {
  uint16_t kind;
  uint16_t version;
  uint32_t header_size;
  uint64_t size;
  uint32_t unused[3];
  uint32_t architecture;
};
constexpr uint32_t kFatBinaryMagic = 0xba55ed50;
constexpr uint16_t kPtx = 1, kMachineCode = 2;

struct Module {
  int code_version;
};

int capability() { return config().major * 10 + config().minor; }

// Machine code runs on later minor versions of its major one, PTX on all
// later ones; the newest that runs is loaded. 0: none.
int best_code(const char* data) {
  FatBinary header;
  std::memcpy(&header, data, sizeof header);
  if (header.magic != kFatBinaryMagic) return 0;
  int machine = 0, ptx = 0;
  const char* at = data + header.header_size;
  const char* end = at + header.size;
  while (at + sizeof(FatBinaryEntry) <= end) {
    FatBinaryEntry entry;
    std::memcpy(&entry, at, sizeof entry);
    int version = static_cast<int>(entry.architecture);
    if (version <= capability()) {
      if (entry.kind == kMachineCode && version / 10 == config().major) {
        machine = std::max(machine, version);
      } else if (entry.kind == kPtx) {
        ptx = std::max(ptx, version);
      }
    }
    if (entry.header_size == 0) break;
    at += entry.header_size + entry.size;
  }
  return machine != 0 ? machine : ptx;
}

struct Table {
  std::mutex mutex;
  std::unordered_map<const void*, const Module*> functions;
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

void** register_module(const void* wrapper) {
  struct {
    int magic, version;
    const char* data;
  } w;
  std::memcpy(&w, wrapper, sizeof w);
  auto* module = new Module{w.data != nullptr ? best_code(w.data) : 0};
  return reinterpret_cast<void**>(module);
}

void register_function(void** module, const void* host_symbol) {
  Table& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  t.functions[host_symbol] = reinterpret_cast<const Module*>(module);
}

int code_version(const void* host_symbol) {
  Table& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  auto it = t.functions.find(host_symbol);
  if (it == t.functions.end() || it->second->code_version == 0) {
    return capability();
  }
  return it->second->code_version;
}

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
      return capability();
    default:
      return 0;
  }
}

void device_uuid(int device, char bytes[16]) {
  std::memcpy(bytes, "rehearsal-card-0", 16);
  bytes[15] = static_cast<char>('0' + device);
}

}  // namespace rehearsal
