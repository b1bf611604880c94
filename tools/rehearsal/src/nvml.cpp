// SPDX-License-Identifier: Apache-2.0
// libnvidia-ml.so.1. NVML's header is in no pip package: the structures below
// follow its documented layout.
#include <cstdio>
#include <cstring>

#include "card.h"
#include "config.h"
#include "front.h"
#include "modules.h"

using namespace rehearsal;

namespace {

enum Nvml : int { kOk = 0, kBadArgument = 2, kUnsupported = 3 };

using Device = void*;

struct MemoryInfo {
  unsigned long long total, free, used;
};
struct MemoryInfoV2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
struct PciInfo {
  char legacy_bus[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char bus_id[32];
};

constexpr uintptr_t kFirst = 0x71000;

Device device_handle(int index) {
  return reinterpret_cast<Device>(kFirst + index);
}

int index_of(Device device) {
  int index = static_cast<int>(address_of(device) - kFirst);
  return device_exists(index) ? index : -1;
}

int nvml(int code) { return code; }

int text(char* out, unsigned length, const char* value) {
  std::snprintf(out, length, "%s", value);
  return kOk;
}

}  // namespace

#define NVML_CALL(name) REHEARSAL_CALL(name, nvml)
#define NVML_DEVICE(name, device) \
  NVML_CALL(name);                \
  const int index = index_of(device); \
  if (index < 0) return kBadArgument
// A card without the feature answers this; so does ours.
#define NVML_ABSENT(name)        \
  EXPORT int name() {            \
    NVML_CALL(#name);            \
    return kUnsupported;         \
  }

EXPORT int nvmlInit_v2() { return kOk; }
EXPORT int nvmlInit() { return kOk; }
EXPORT int nvmlInitWithFlags(unsigned) { return kOk; }
EXPORT int nvmlShutdown() { return kOk; }
EXPORT const char* nvmlErrorString(int code) {
  switch (code) {
    case kOk: return "Success";
    case kBadArgument: return "Invalid Argument";
    case kUnsupported: return "Not Supported";
    default: return "Unknown Error";
  }
}
EXPORT int nvmlSystemGetDriverVersion(char* out, unsigned length) {
  NVML_CALL("nvmlSystemGetDriverVersion");
  return text(out, length, "580.65.06");
}
EXPORT int nvmlSystemGetNVMLVersion(char* out, unsigned length) {
  NVML_CALL("nvmlSystemGetNVMLVersion");
  return text(out, length, "13.580.65.06");
}
EXPORT int nvmlSystemGetCudaDriverVersion(int* version) {
  NVML_CALL("nvmlSystemGetCudaDriverVersion");
  *version = 13000;
  return kOk;
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  return nvmlSystemGetCudaDriverVersion(version);
}
EXPORT int nvmlDeviceGetCount_v2(unsigned* count) {
  NVML_CALL("nvmlDeviceGetCount_v2");
  *count = static_cast<unsigned>(config().cards);
  return kOk;
}
EXPORT int nvmlDeviceGetCount(unsigned* count) {
  return nvmlDeviceGetCount_v2(count);
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device* device) {
  NVML_CALL("nvmlDeviceGetHandleByIndex_v2");
  if (!device_exists(static_cast<int>(index))) return kBadArgument;
  *device = device_handle(static_cast<int>(index));
  return kOk;
}
EXPORT int nvmlDeviceGetHandleByIndex(unsigned index, Device* device) {
  return nvmlDeviceGetHandleByIndex_v2(index, device);
}
EXPORT int nvmlDeviceGetPciInfo_v3(Device device, PciInfo* pci) {
  NVML_DEVICE("nvmlDeviceGetPciInfo_v3", device);
  std::memset(pci, 0, sizeof *pci);
  pci->bus = static_cast<unsigned>(index + 1);
  std::snprintf(pci->legacy_bus, sizeof pci->legacy_bus, "0000:%02x:00.0",
                index + 1);
  std::snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02x:00.0",
                index + 1);
  return kOk;
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, Device* device) {
  NVML_CALL("nvmlDeviceGetHandleByPciBusId_v2");
  unsigned domain = 0, number = 0;
  if (std::sscanf(bus, "%x:%x", &domain, &number) != 2) return kBadArgument;
  if (!device_exists(static_cast<int>(number) - 1)) return kBadArgument;
  *device = device_handle(static_cast<int>(number) - 1);
  return kOk;
}
EXPORT int nvmlDeviceGetUUID(Device device, char* out, unsigned length) {
  NVML_DEVICE("nvmlDeviceGetUUID", device);
  char bytes[16], hex[64];
  device_uuid(index, bytes);
  int at = std::snprintf(hex, sizeof hex, "GPU-");
  for (int i = 0; i < 16; ++i) {
    bool dash = i == 4 || i == 6 || i == 8 || i == 10;
    at += std::snprintf(hex + at, sizeof hex - at, "%s%02x", dash ? "-" : "",
                        static_cast<unsigned char>(bytes[i]));
  }
  return text(out, length, hex);
}
EXPORT int nvmlDeviceGetHandleByUUID(const char* uuid, Device* device) {
  NVML_CALL("nvmlDeviceGetHandleByUUID");
  for (int index = 0; index < config().cards; ++index) {
    char known[64];
    nvmlDeviceGetUUID(device_handle(index), known, sizeof known);
    if (std::strcmp(known, uuid) != 0) continue;
    *device = device_handle(index);
    return kOk;
  }
  return kBadArgument;
}
EXPORT int nvmlDeviceGetIndex(Device device, unsigned* out) {
  NVML_DEVICE("nvmlDeviceGetIndex", device);
  *out = static_cast<unsigned>(index);
  return kOk;
}
EXPORT int nvmlDeviceGetName(Device device, char* out, unsigned length) {
  NVML_DEVICE("nvmlDeviceGetName", device);
  return text(out, length, config().name.c_str());
}
EXPORT int nvmlDeviceGetCudaComputeCapability(Device device, int* major,
                                              int* minor) {
  NVML_DEVICE("nvmlDeviceGetCudaComputeCapability", device);
  *major = config().major;
  *minor = config().minor;
  return kOk;
}
EXPORT int nvmlDeviceGetMemoryInfo(Device device, MemoryInfo* info) {
  NVML_DEVICE("nvmlDeviceGetMemoryInfo", device);
  info->total = config().memory;
  info->free = card(index).free();
  info->used = info->total - info->free;
  return kOk;
}
EXPORT int nvmlDeviceGetMemoryInfo_v2(Device device, MemoryInfoV2* info) {
  NVML_DEVICE("nvmlDeviceGetMemoryInfo_v2", device);
  info->total = config().memory;
  info->reserved = 0;
  info->free = card(index).free();
  info->used = info->total - info->free;
  return kOk;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(Device device,
                                                   unsigned* count, void*) {
  NVML_DEVICE("nvmlDeviceGetComputeRunningProcesses_v3", device);
  *count = 0;
  return kOk;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(Device device, unsigned* count,
                                                void* processes) {
  return nvmlDeviceGetComputeRunningProcesses_v3(device, count, processes);
}
EXPORT int nvmlDeviceGetP2PStatus(Device, Device, int, int* status) {
  NVML_CALL("nvmlDeviceGetP2PStatus");
  *status = 5;  // not supported
  return kOk;
}
EXPORT int nvmlDeviceGetNumaNodeId(Device device, unsigned* node) {
  NVML_DEVICE("nvmlDeviceGetNumaNodeId", device);
  *node = 0;
  return kOk;
}
EXPORT int nvmlDeviceGetCpuAffinity(Device device, unsigned words,
                                    unsigned long* mask) {
  NVML_DEVICE("nvmlDeviceGetCpuAffinity", device);
  for (unsigned i = 0; i < words; ++i) mask[i] = ~0ul;
  return kOk;
}
NVML_ABSENT(nvmlSystemGetConfComputeState)
NVML_ABSENT(nvmlDeviceGetMigMode)
NVML_ABSENT(nvmlDeviceGetNvLinkState)
NVML_ABSENT(nvmlDeviceGetNvLinkRemoteDeviceType)
NVML_ABSENT(nvmlDeviceGetNvLinkRemotePciInfo_v2)
NVML_ABSENT(nvmlDeviceGetGpuFabricInfoV)
