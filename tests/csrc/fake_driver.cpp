// SPDX-License-Identifier: Apache-2.0
// A libcuda.so.1 for tests: books instead of memory. It is stricter than a real
// driver: whatever a correct allocator never does is recorded as a violation.
#include "fake_driver.h"

#include <cuda.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>

namespace {

constexpr std::uint64_t kGranularity = 2 << 20;
constexpr std::uint64_t kFirstAddress = 0x700000000000;
constexpr int kDevices = 2;

struct Memory {
  int device;
  std::uint64_t size;
  bool released = false;
  int mappings = 0;
};

struct Mapping {
  std::uint64_t size;
  std::uint64_t handle;
  bool accessible = false;
  std::set<void*> users;  // streams with unfinished work on it
};

struct Capture {
  std::thread::id thread;
  bool blocking = false;
  bool valid = true;
};

struct Failure {
  int nth;
  int times;
  CUresult code;
};

struct Fake {
  std::uint64_t capacity = 0;
  std::uint64_t used[kDevices] = {};
  std::uint64_t last_handle = 0x1000;
  std::uint64_t injected = 0;
  std::map<std::uint64_t, Memory> memory;
  std::map<std::uint64_t, std::uint64_t> reservations;
  std::map<std::uint64_t, Mapping> mappings;
  std::map<void*, Capture> captures;
  std::map<std::string, int> calls;
  std::map<std::string, Failure> failures;
  std::map<std::string, int> options;
  std::uint64_t violations = 0;
  std::uint64_t broken_captures = 0;
  std::string violation_texts;
  int last_handle_types = 0;
  int last_rdma = 0;
};

std::mutex mutex;
std::condition_variable gate_opened;
std::string gate;  // the function that waits; empty when open
int waiting = 0;

Fake& fake() {
  static auto* const state = new Fake;
  return *state;
}

thread_local CUcontext current = nullptr;
thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

CUcontext context_of(int device) {
  return reinterpret_cast<CUcontext>(std::uintptr_t(0x100 + device));
}

int device_of(CUcontext context) {
  if (context == nullptr) return -1;
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(context)) - 0x100;
}

CUresult violate(const std::string& what) {
  fake().violations += 1;
  if (fake().violations <= 20) fake().violation_texts += what + "\n";
  return CUDA_ERROR_INVALID_VALUE;
}

void break_capture(Capture* capture) {
  if (capture->valid) fake().broken_captures += 1;
  capture->valid = false;
}

// Entry to every function: counts it, and gives the result that it must return
// at once, if any. Called with the mutex held.
bool fails(std::unique_lock<std::mutex>* lock, const char* function,
           CUresult* result) {
  if (gate == function) {
    waiting += 1;
    // Not for ever: a test that holds the GIL could never open it.
    gate_opened.wait_for(*lock, std::chrono::seconds(10),
                         [] { return gate.empty(); });
    waiting -= 1;
  }
  fake().calls[function] += 1;
  if (fake().options["gone"]) {
    *result = CUDA_ERROR_DEINITIALIZED;
    return true;
  }
  auto planned = fake().failures.find(function);
  if (planned == fake().failures.end()) return false;
  Failure& failure = planned->second;
  if (--failure.nth > 0) return false;
  *result = failure.code;
  fake().injected += 1;
  if (--failure.times == 0) fake().failures.erase(planned);
  return true;
}

// A call that a capture does not see: in the default mode it breaks captures.
void unsafe_call() {
  if (capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return;
  for (auto& [stream, capture] : fake().captures) break_capture(&capture);
}

void check_context(const char* function, int device) {
  if (device_of(current) != device) {
    violate(std::string(function) + " without the context of device " +
            std::to_string(device));
  }
}

void drop_if_unused(std::uint64_t handle) {
  auto found = fake().memory.find(handle);
  const Memory& memory = found->second;
  if (!memory.released || memory.mappings > 0) return;
  fake().used[memory.device] -= memory.size;
  fake().memory.erase(found);
}

}  // namespace

#define ENTER(function)                     \
  std::unique_lock<std::mutex> lock(mutex); \
  CUresult planned = CUDA_SUCCESS;          \
  if (fails(&lock, #function, &planned)) return planned

extern "C" {
#pragma GCC visibility push(default)

CUresult cuGetErrorName(CUresult error, const char** name) {
  switch (error) {
    case CUDA_ERROR_INVALID_VALUE:
      *name = "CUDA_ERROR_INVALID_VALUE";
      break;
    case CUDA_ERROR_OUT_OF_MEMORY:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      break;
    case CUDA_ERROR_DEINITIALIZED:
      *name = "CUDA_ERROR_DEINITIALIZED";
      break;
    case CUDA_ERROR_UNKNOWN:
      *name = "CUDA_ERROR_UNKNOWN";
      break;
    default:
      *name = nullptr;
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  ENTER(cuCtxGetCurrent);
  *context = current;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  ENTER(cuCtxSetCurrent);
  current = context;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
  ENTER(cuCtxGetDevice);
  if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  *device = device_of(current);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  ENTER(cuDevicePrimaryCtxRetain);
  if (device < 0 || device >= kDevices) return CUDA_ERROR_INVALID_DEVICE;
  *context = context_of(device);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                              CUdevice device) {
  ENTER(cuDeviceGetAttribute);
  if (device < 0 || device >= kDevices) return CUDA_ERROR_INVALID_DEVICE;
  *value = 0;
  if (attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED) {
    *value = fake().options["fabric"];
  }
  if (attribute ==
      CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) {
    *value = fake().options["rdma"];
  }
  return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  ENTER(cuThreadExchangeStreamCaptureMode);
  std::swap(*mode, capture_mode);
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  ENTER(cuStreamIsCapturing);
  if (stream == nullptr) {
    for (const auto& [other, capture] : fake().captures) {
      if (capture.blocking) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
  }
  auto found = fake().captures.find(stream);
  *status = found == fake().captures.end() ? CU_STREAM_CAPTURE_STATUS_NONE
            : found->second.valid          ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                  : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
  ENTER(cuStreamSynchronize);
  unsafe_call();
  for (auto& [other, capture] : fake().captures) {
    if (other == stream || (stream == nullptr && capture.blocking)) {
      break_capture(&capture);
      return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
  }
  for (auto& [address, mapping] : fake().mappings) mapping.users.erase(stream);
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t* granularity,
                                       const CUmemAllocationProp* prop,
                                       CUmemAllocationGranularity_flags) {
  ENTER(cuMemGetAllocationGranularity);
  if (prop->location.id < 0 || prop->location.id >= kDevices) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t,
                             CUdeviceptr, unsigned long long) {
  ENTER(cuMemAddressReserve);
  unsafe_call();
  if (size == 0 || size % kGranularity != 0) {
    return violate("cuMemAddressReserve of a size that is no multiple");
  }
  // The lowest gap: an address that was just freed is handed out again at once.
  std::uint64_t candidate = kFirstAddress;
  for (const auto& [start, length] : fake().reservations) {
    if (candidate + size <= start) break;
    candidate = start + length;
  }
  fake().reservations[candidate] = size;
  *address = candidate;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  ENTER(cuMemAddressFree);
  unsafe_call();
  auto found = fake().reservations.find(address);
  if (found == fake().reservations.end() || found->second != size) {
    return violate("cuMemAddressFree of a range that is not reserved");
  }
  if (fake().mappings.count(address)) {
    return violate("cuMemAddressFree of a range that is mapped");
  }
  fake().reservations.erase(found);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                     const CUmemAllocationProp* prop, unsigned long long) {
  ENTER(cuMemCreate);
  unsafe_call();
  const int device = prop->location.id;
  check_context("cuMemCreate", device);
  fake().last_handle_types = prop->requestedHandleTypes;
  fake().last_rdma = prop->allocFlags.gpuDirectRDMACapable;
  if (prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE || size == 0 ||
      size % kGranularity != 0) {
    return violate("cuMemCreate of something else than pinned device memory");
  }
  if (prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_FABRIC &&
      fake().options["fabric_denied"]) {
    return CUDA_ERROR_NOT_PERMITTED;
  }
  if (size > fake().capacity - fake().used[device]) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  fake().used[device] += size;
  *handle = ++fake().last_handle;
  fake().memory[*handle] = Memory{device, size};
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  ENTER(cuMemRelease);
  unsafe_call();
  auto found = fake().memory.find(handle);
  if (found == fake().memory.end() || found->second.released) {
    return violate("cuMemRelease of an unknown handle");
  }
  found->second.released = true;
  drop_if_unused(handle);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long) {
  ENTER(cuMemMap);
  unsafe_call();
  auto range = fake().reservations.find(address);
  auto memory = fake().memory.find(handle);
  if (range == fake().reservations.end() || range->second != size) {
    return violate("cuMemMap outside a reserved range");
  }
  if (memory == fake().memory.end() || memory->second.released ||
      memory->second.size != size || offset != 0) {
    return violate("cuMemMap of an unknown handle or another size");
  }
  if (fake().mappings.count(address)) {
    return violate("cuMemMap over a mapping");
  }
  check_context("cuMemMap", memory->second.device);
  memory->second.mappings += 1;
  fake().mappings[address] = Mapping{size, handle, false, {}};
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  ENTER(cuMemUnmap);
  unsafe_call();
  auto found = fake().mappings.find(address);
  if (found == fake().mappings.end() || found->second.size != size) {
    return violate("cuMemUnmap of a range that is not mapped");
  }
  if (!found->second.users.empty()) {
    violate("cuMemUnmap of memory that a kernel still uses");
  }
  const std::uint64_t handle = found->second.handle;
  check_context("cuMemUnmap", fake().memory.at(handle).device);
  fake().memory.at(handle).mappings -= 1;
  fake().mappings.erase(found);
  drop_if_unused(handle);
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size,
                        const CUmemAccessDesc* access, size_t count) {
  ENTER(cuMemSetAccess);
  unsafe_call();
  auto found = fake().mappings.find(address);
  if (found == fake().mappings.end() || found->second.size != size) {
    return violate("cuMemSetAccess of a range that is not mapped");
  }
  if (count != 1 || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE ||
      access->location.id != fake().memory.at(found->second.handle).device) {
    return violate("cuMemSetAccess without read and write for the device");
  }
  found->second.accessible = true;
  return CUDA_SUCCESS;
}

#pragma GCC visibility pop
}  // extern "C"

void fake_reset(std::uint64_t mib) {
  std::lock_guard<std::mutex> lock(mutex);
  fake() = Fake();
  fake().capacity = mib << 20;
  current = context_of(0);
  capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
}

void fake_fail(const char* function, int nth, int times, int code) {
  std::lock_guard<std::mutex> lock(mutex);
  fake().failures.erase(function);
  if (times == 0) return;
  fake().failures[function] = Failure{nth, times, CUresult(code)};
}

int fake_calls(const char* function) {
  std::lock_guard<std::mutex> lock(mutex);
  return fake().calls[function];
}

std::uint64_t fake_count(const char* what) {
  std::lock_guard<std::mutex> lock(mutex);
  const std::string name = what;
  if (name == "handles") {
    std::uint64_t held = 0;
    for (const auto& [handle, memory] : fake().memory) held += !memory.released;
    return held;
  }
  if (name == "mappings") return fake().mappings.size();
  if (name == "reservations") return fake().reservations.size();
  if (name == "used") return fake().used[0] + fake().used[1];
  if (name == "violations") return fake().violations;
  if (name == "captures") return fake().captures.size();
  if (name == "broken_captures") return fake().broken_captures;
  if (name == "injected") return fake().injected;
  return ~std::uint64_t(0);
}

const char* fake_violations() {
  std::lock_guard<std::mutex> lock(mutex);
  static auto* const text = new std::string;
  *text = fake().violation_texts;
  return text->c_str();
}

void fake_set(const char* option, int value) {
  std::lock_guard<std::mutex> lock(mutex);
  fake().options[option] = value;
}

int fake_last_handle_types() {
  std::lock_guard<std::mutex> lock(mutex);
  return fake().last_handle_types;
}

int fake_last_rdma() {
  std::lock_guard<std::mutex> lock(mutex);
  return fake().last_rdma;
}

void fake_set_current(int device) {
  current = device < 0 ? nullptr : context_of(device);
}

int fake_current() { return device_of(current); }

void fake_launch(void* stream, std::uint64_t address) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = fake().mappings.find(address);
  if (found == fake().mappings.end() || !found->second.accessible) {
    violate("a kernel on memory that is not mapped");
    return;
  }
  found->second.users.insert(stream);
}

void fake_begin_capture(void* stream, int blocking) {
  std::lock_guard<std::mutex> lock(mutex);
  fake().captures[stream] =
      Capture{std::this_thread::get_id(), blocking != 0, true};
}

int fake_end_capture(void* stream) {
  std::lock_guard<std::mutex> lock(mutex);
  const bool valid = fake().captures.at(stream).valid;
  fake().captures.erase(stream);
  return valid;
}

void fake_close_gate(const char* function) {
  std::lock_guard<std::mutex> lock(mutex);
  gate = function;
}

int fake_waiting() {
  std::lock_guard<std::mutex> lock(mutex);
  return waiting;
}

void fake_open_gate() {
  std::lock_guard<std::mutex> lock(mutex);
  gate.clear();
  gate_opened.notify_all();
}

int fake_is_reserved(std::uint64_t address) {
  std::lock_guard<std::mutex> lock(mutex);
  return fake().reservations.count(address) != 0;
}

int fake_is_usable(std::uint64_t address) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = fake().mappings.find(address);
  return found != fake().mappings.end() && found->second.accessible;
}

int fake_cycle_in_thread(fake_malloc_t* allocate, fake_free_t* release,
                         int milliseconds) {
  auto* const done = new std::promise<void*>;
  std::future<void*> result = done->get_future();
  std::thread([=] {
    void* pointer = allocate(kGranularity, 0, nullptr);
    if (pointer) release(pointer, kGranularity, 0, nullptr);
    done->set_value(pointer);
    delete done;
  }).detach();
  if (result.wait_for(std::chrono::milliseconds(milliseconds)) !=
      std::future_status::ready) {
    return 0;
  }
  return result.get() != nullptr;
}

void fake_free_at_exit(fake_free_t* release, void* pointer) {
  static fake_free_t* release_at_exit;
  static void* pointer_at_exit;
  release_at_exit = release;
  pointer_at_exit = pointer;
  std::atexit([] {
    release_at_exit(pointer_at_exit, kGranularity, 0, nullptr);
    std::printf("at exit: %d reserved, %d violations\n",
                static_cast<int>(fake_count("reservations")),
                static_cast<int>(fake_count("violations")));
    std::fflush(stdout);
  });
}
