// SPDX-License-Identifier: Apache-2.0
// libcudart.so: the runtime. Its error codes are the driver's numbers.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <utility>

#include "attributes.h"
#include "card.h"
#include "config.h"
#include "context.h"
#include "copies.h"
#include "entry_points.h"
#include "front.h"
#include "host_memory.h"
#include "memory.h"
#include "modules.h"
#include "streams.h"

using namespace rehearsal;

namespace {

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t done(int code) {
  if (code != 0) last_error = static_cast<cudaError_t>(code);
  return static_cast<cudaError_t>(code);
}

void* handle(cudaStream_t stream) { return reinterpret_cast<void*>(stream); }

cudaError_t launch() {
  if (Result r = ensure_context()) return done(r);
  card(current_device()).launch();
  return cudaSuccess;
}

}  // namespace

#define RUNTIME_CALL(name) REHEARSAL_CALL(name, done)
#define CONTEXT_CALL(name) \
  RUNTIME_CALL(name);      \
  if (Result r = ensure_context()) return done(r)
#define DEVICE(device) \
  if (!device_exists(device)) return done(kInvalidDevice)

// ---- What nvcc's generated code calls

namespace {

struct LaunchConfiguration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local LaunchConfiguration pushed;

}  // namespace

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block,
                                            size_t shared, CUstream_st* stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block,
                                              size_t* shared, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *static_cast<void**>(stream) = pushed.stream;
  return cudaSuccess;
}

EXPORT void** __cudaRegisterFatBinary(void* wrapper) {
  return register_module(wrapper);
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT char __cudaInitModule(void**) { return 1; }
EXPORT void __cudaRegisterFunction(void** module, const char* symbol, char*,
                                   const char*, int, void*, void*, dim3*, dim3*,
                                   int*) {
  register_function(module, symbol);
}
EXPORT void __cudaRegisterVar(void**, char* symbol, char*, const char*, int,
                              size_t size, int, int) {
  register_variable(symbol, size);
}
EXPORT void __cudaRegisterManagedVar(void**, void** symbol, char*, const char*,
                                     int, size_t size, int, int) {
  *symbol = opaque_object(size);
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

// ---- Launches

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t,
                                      cudaStream_t) {
  RUNTIME_CALL("cudaLaunchKernel");
  return launch();
}
EXPORT cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t, dim3, dim3, void**,
                                           size_t, cudaStream_t) {
  RUNTIME_CALL("cudaLaunchKernel");
  return launch();
}
EXPORT cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t,
                                    cudaStream_t) {
  RUNTIME_CALL("cudaLaunchKernel");
  return launch();
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*,
                                       void**) {
  RUNTIME_CALL("cudaLaunchKernelExC");
  return launch();
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**,
                                               size_t, cudaStream_t) {
  RUNTIME_CALL("cudaLaunchCooperativeKernel");
  return launch();
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function,
                                      void* data) {
  CONTEXT_CALL("cudaLaunchHostFunc");
  function(data);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream,
                                         cudaStreamCallback_t function,
                                         void* data, unsigned) {
  CONTEXT_CALL("cudaStreamAddCallback");
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes,
                                         const void* function) {
  RUNTIME_CALL("cudaFuncGetAttributes");
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock =
      kernel_attribute(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
  attributes->numRegs = kernel_attribute(CU_FUNC_ATTRIBUTE_NUM_REGS);
  attributes->binaryVersion = attributes->ptxVersion = code_version(function);
  attributes->maxDynamicSharedSizeBytes = device_attribute(
      CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, current_device());
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks,
                                                                 const void*,
                                                                 int threads,
                                                                 size_t) {
  RUNTIME_CALL("cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  *blocks = resident_blocks(threads);
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void*, int threads, size_t, unsigned) {
  RUNTIME_CALL("cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags");
  *blocks = resident_blocks(threads);
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*,
                                                  const cudaLaunchConfig_t*) {
  RUNTIME_CALL("cudaOccupancyMaxActiveClusters");
  *clusters = 8;
  return cudaSuccess;
}

// ---- Device code

EXPORT cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  CONTEXT_CALL("cudaGetSymbolAddress");
  ModuleVariable v = variable_of(symbol);
  if (v.address == 0) return done(cudaErrorInvalidSymbol);
  *address = reinterpret_cast<void*>(v.address);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetSymbolSize(size_t* size, const void* symbol) {
  CONTEXT_CALL("cudaGetSymbolSize");
  ModuleVariable v = variable_of(symbol);
  if (v.address == 0) return done(cudaErrorInvalidSymbol);
  *size = v.size;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from,
                                      size_t size, size_t offset,
                                      cudaMemcpyKind) {
  CONTEXT_CALL("cudaMemcpyToSymbol");
  ModuleVariable v = variable_of(symbol);
  if (v.address == 0) return done(cudaErrorInvalidSymbol);
  if (offset + size > v.size) return done(kInvalidValue);
  return done(copy("cudaMemcpyToSymbol", v.address + offset, address_of(from),
                   size));
}
EXPORT cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void*,
                                       cudaJitOption*, void**, unsigned,
                                       cudaLibraryOption*, void**, unsigned) {
  CONTEXT_CALL("cudaLibraryLoadData");
  *library = static_cast<cudaLibrary_t>(opaque_object());
  return cudaSuccess;
}
EXPORT cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t,
                                        const char*) {
  CONTEXT_CALL("cudaLibraryGetKernel");
  *kernel = static_cast<cudaKernel_t>(opaque_object());
  return cudaSuccess;
}

// ---- Devices

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  RUNTIME_CALL("cudaGetDeviceCount");
  initialize();
  *count = config().cards;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDevice(int* device) {
  RUNTIME_CALL("cudaGetDevice");
  initialize();
  *device = current_device();
  return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int device) {
  RUNTIME_CALL("cudaSetDevice");
  return done(set_current_device(device));
}
EXPORT cudaError_t cudaInitDevice(int device, unsigned, unsigned) {
  RUNTIME_CALL("cudaInitDevice");
  DEVICE(device);
  initialize();
  return card(device).open_context() ? cudaSuccess : done(kOutOfMemory);
}
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  RUNTIME_CALL("cudaRuntimeGetVersion");
  *version = CUDART_VERSION;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  RUNTIME_CALL("cudaDriverGetVersion");
  *version = CUDA_VERSION;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute,
                                          int device) {
  RUNTIME_CALL("cudaDeviceGetAttribute");
  DEVICE(device);
  *value = device_attribute(attribute, device);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  RUNTIME_CALL("cudaDeviceGetStreamPriorityRange");
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  RUNTIME_CALL("cudaDeviceGetPCIBusId");
  DEVICE(device);
  std::snprintf(text, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* possible, int, int) {
  RUNTIME_CALL("cudaDeviceCanAccessPeer");
  *possible = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetLimit(size_t* value, cudaLimit limit) {
  RUNTIME_CALL("cudaDeviceGetLimit");
  switch (limit) {
    case cudaLimitStackSize: *value = 1024; break;
    case cudaLimitPrintfFifoSize: *value = size_t{1} << 20; break;
    case cudaLimitMallocHeapSize: *value = size_t{8} << 20; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  RUNTIME_CALL("cudaGetDeviceProperties");
  DEVICE(device);
  initialize();
  auto attribute = [device](CUdevice_attribute a) {
    return device_attribute(a, device);
  };
  std::memset(p, 0, sizeof *p);
  std::snprintf(p->name, sizeof p->name, "%s", config().name.c_str());
  device_uuid(device, p->uuid.bytes);
  p->totalGlobalMem = config().memory;
  p->major = config().major;
  p->minor = config().minor;
  p->multiProcessorCount = config().multiprocessors;
  p->pciBusID = device + 1;
  p->sharedMemPerBlock =
      attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
  p->sharedMemPerBlockOptin =
      attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  p->sharedMemPerMultiprocessor =
      attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  p->reservedSharedMemPerBlock =
      attribute(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK);
  p->regsPerBlock = attribute(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK);
  p->regsPerMultiprocessor =
      attribute(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR);
  p->warpSize = attribute(CU_DEVICE_ATTRIBUTE_WARP_SIZE);
  p->memPitch = attribute(CU_DEVICE_ATTRIBUTE_MAX_PITCH);
  p->maxThreadsPerBlock =
      attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
  p->maxThreadsDim[0] = attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X);
  p->maxThreadsDim[1] = attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y);
  p->maxThreadsDim[2] = attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z);
  p->maxGridSize[0] = attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X);
  p->maxGridSize[1] = attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y);
  p->maxGridSize[2] = attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z);
  p->totalConstMem = attribute(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY);
  p->textureAlignment = attribute(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT);
  p->texturePitchAlignment =
      attribute(CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT);
  p->l2CacheSize = attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
  p->persistingL2CacheMaxSize =
      attribute(CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE);
  p->memoryBusWidth = attribute(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
  p->maxThreadsPerMultiProcessor = max_threads_per_multiprocessor();
  p->maxBlocksPerMultiProcessor =
      attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR);
  p->asyncEngineCount = attribute(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
  p->clusterLaunch = attribute(CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH);
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = 1;
  p->streamPrioritiesSupported = p->managedMemory = 1;
  p->globalL1CacheSupported = p->localL1CacheSupported = 1;
  p->concurrentManagedAccess = p->computePreemptionSupported = 1;
  p->canUseHostPointerForRegisteredMem = p->cooperativeLaunch = 1;
  p->hostRegisterSupported = p->memoryPoolsSupported = 1;
  p->unifiedFunctionPointers = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSynchronize() {
  CONTEXT_CALL("cudaDeviceSynchronize");
  return done(synchronize_device());
}

// ---- Errors

EXPORT cudaError_t cudaGetLastError() {
  return std::exchange(last_error, cudaSuccess);
}
EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }

namespace {

struct ErrorText {
  cudaError_t code;
  const char* name;
  const char* text;
};

constexpr ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError",
     "initialization error"},
    {cudaErrorInvalidSymbol, "cudaErrorInvalidSymbol", "invalid device symbol"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice",
     "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle",
     "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorHostMemoryAlreadyRegistered,
     "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not initiated in this stream"},
};

}  // namespace

EXPORT const char* cudaGetErrorName(cudaError_t code) {
  for (const ErrorText& e : kErrors) {
    if (e.code == code) return e.name;
  }
  return "cudaErrorUnknown";
}
EXPORT const char* cudaGetErrorString(cudaError_t code) {
  for (const ErrorText& e : kErrors) {
    if (e.code == code) return e.text;
  }
  return "unknown error";
}

// ---- Memory

namespace {

cudaError_t allocate_device(void** address, size_t size) {
  if (Result r = unsafe_call()) return done(r);
  if (size == 0) {
    *address = nullptr;
    return cudaSuccess;
  }
  uintptr_t at = 0;
  Result result = allocate(&at, size, current_device());
  if (result == kSuccess) *address = reinterpret_cast<void*>(at);
  return done(result);
}

cudaError_t free_device(void* address) {
  if (address == nullptr) return cudaSuccess;
  if (Result r = unsafe_call()) return done(r);
  return done(free_allocation(address_of(address)));
}

}  // namespace

EXPORT cudaError_t cudaMalloc(void** address, size_t size) {
  CONTEXT_CALL("cudaMalloc");
  return allocate_device(address, size);
}
EXPORT cudaError_t cudaFree(void* address) {
  CONTEXT_CALL("cudaFree");
  return free_device(address);
}
EXPORT cudaError_t cudaMallocAsync(void** address, size_t size, cudaStream_t) {
  CONTEXT_CALL("cudaMallocAsync");
  return allocate_device(address, size);
}
EXPORT cudaError_t cudaFreeAsync(void* address, cudaStream_t) {
  CONTEXT_CALL("cudaFreeAsync");
  return free_device(address);
}
EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  CONTEXT_CALL("cudaMemGetInfo");
  *free = card(current_device()).free();
  *total = config().memory;
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
  CONTEXT_CALL("cudaHostAlloc");
  return done(host_allocate(address, size));
}
EXPORT cudaError_t cudaMallocHost(void** address, size_t size) {
  CONTEXT_CALL("cudaMallocHost");
  return done(host_allocate(address, size));
}
EXPORT cudaError_t cudaFreeHost(void* address) {
  CONTEXT_CALL("cudaFreeHost");
  return address == nullptr ? cudaSuccess : done(host_free(address));
}
EXPORT cudaError_t cudaHostRegister(void* address, size_t size, unsigned) {
  CONTEXT_CALL("cudaHostRegister");
  if (Result r = unsafe_call()) return done(r);
  return done(host_register(address, size));
}
EXPORT cudaError_t cudaHostUnregister(void* address) {
  CONTEXT_CALL("cudaHostUnregister");
  if (Result r = unsafe_call()) return done(r);
  return done(host_unregister(address));
}
EXPORT cudaError_t cudaHostGetDevicePointer(void** device, void* host,
                                            unsigned) {
  CONTEXT_CALL("cudaHostGetDevicePointer");
  if (!host_region_at(address_of(host))) return done(kInvalidValue);
  *device = host;
  return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                            const void* address) {
  CONTEXT_CALL("cudaPointerGetAttributes");
  std::memset(attributes, 0, sizeof *attributes);
  void* pointer = const_cast<void*>(address);
  if (auto region = region_at(address_of(address))) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = region->device;
    attributes->devicePointer = pointer;
  } else if (host_region_at(address_of(address))) {
    attributes->type = cudaMemoryTypeHost;
    attributes->device = current_device();
    attributes->devicePointer = attributes->hostPointer = pointer;
  } else {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;
    attributes->hostPointer = pointer;
  }
  return cudaSuccess;
}

// ---- Copies and fills

#define COPY(name, to, from, size) \
  CONTEXT_CALL(name);              \
  return done(copy(name, address_of(to), address_of(from), size))

EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t size,
                              cudaMemcpyKind) {
  COPY("cudaMemcpy", to, from, size);
}
EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size,
                                   cudaMemcpyKind, cudaStream_t) {
  COPY("cudaMemcpyAsync", to, from, size);
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int,
                                       size_t size, cudaStream_t) {
  COPY("cudaMemcpyPeerAsync", to, from, size);
}
EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch,
                                     const void* from, size_t from_pitch,
                                     size_t width, size_t height,
                                     cudaMemcpyKind, cudaStream_t) {
  CONTEXT_CALL("cudaMemcpy2DAsync");
  for (size_t row = 0; row < height; ++row) {
    Result result =
        copy("cudaMemcpy2DAsync", address_of(to) + row * to_pitch,
             address_of(from) + row * from_pitch, width);
    if (result != kSuccess) return done(result);
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void* to, int value, size_t size) {
  CONTEXT_CALL("cudaMemset");
  return done(fill("cudaMemset", address_of(to), value & 0xff, 1, size));
}
EXPORT cudaError_t cudaMemsetAsync(void* to, int value, size_t size,
                                   cudaStream_t) {
  CONTEXT_CALL("cudaMemsetAsync");
  return done(fill("cudaMemsetAsync", address_of(to), value & 0xff, 1, size));
}

// ---- Streams and events

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream,
                                                unsigned flags, int priority) {
  CONTEXT_CALL("cudaStreamCreateWithPriority");
  return done(create_stream(reinterpret_cast<void**>(stream), current_device(),
                            flags, priority));
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream,
                                             unsigned flags) {
  CONTEXT_CALL("cudaStreamCreateWithFlags");
  return done(create_stream(reinterpret_cast<void**>(stream), current_device(),
                            flags, 0));
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  CONTEXT_CALL("cudaStreamCreate");
  return done(
      create_stream(reinterpret_cast<void**>(stream), current_device(), 0, 0));
}
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  CONTEXT_CALL("cudaStreamDestroy");
  return done(destroy_stream(handle(stream)));
}

namespace {

cudaError_t query_stream(cudaStream_t stream, StreamInfo* info) {
  if (Result r = ensure_context()) return done(r);
  return done(stream_info(handle(stream), current_device(), info));
}

}  // namespace

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  RUNTIME_CALL("cudaStreamGetPriority");
  StreamInfo info;
  cudaError_t result = query_stream(stream, &info);
  if (result == cudaSuccess) *priority = info.priority;
  return result;
}
EXPORT cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  RUNTIME_CALL("cudaStreamGetFlags");
  StreamInfo info;
  cudaError_t result = query_stream(stream, &info);
  if (result == cudaSuccess) *flags = info.flags;
  return result;
}
EXPORT cudaError_t cudaStreamGetId(cudaStream_t stream,
                                   unsigned long long* id) {
  RUNTIME_CALL("cudaStreamGetId");
  StreamInfo info;
  cudaError_t result = query_stream(stream, &info);
  if (result == cudaSuccess) *id = info.id;
  return result;
}
EXPORT cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  RUNTIME_CALL("cudaStreamGetDevice");
  StreamInfo info;
  cudaError_t result = query_stream(stream, &info);
  if (result == cudaSuccess) *device = info.device;
  return result;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
  CONTEXT_CALL("cudaStreamQuery");
  return done(synchronize_stream(handle(stream)));
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  CONTEXT_CALL("cudaStreamSynchronize");
  return done(synchronize_stream(handle(stream)));
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t event,
                                       unsigned) {
  CONTEXT_CALL("cudaStreamWaitEvent");
  return done(use_event(event, "cudaStreamWaitEvent"));
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream,
                                         cudaStreamCaptureStatus* status) {
  CONTEXT_CALL("cudaStreamIsCapturing");
  CaptureStatus s;
  Result result = capture_status(handle(stream), &s, nullptr, nullptr);
  *status = static_cast<cudaStreamCaptureStatus>(s);
  return done(result);
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, cudaStreamCaptureStatus* status,
    unsigned long long* id, cudaGraph_t* graph,
    const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges,
    size_t* count) {
  CONTEXT_CALL("cudaStreamGetCaptureInfo");
  CaptureStatus s;
  uint64_t capture = 0;
  void* captured = nullptr;
  Result result = capture_status(handle(stream), &s, &capture, &captured);
  *status = static_cast<cudaStreamCaptureStatus>(s);
  if (id != nullptr) *id = capture;
  if (graph != nullptr) *graph = static_cast<cudaGraph_t>(captured);
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return done(result);
}
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream,
                                          cudaStreamCaptureMode mode) {
  CONTEXT_CALL("cudaStreamBeginCapture");
  return done(begin_capture(handle(stream), static_cast<CaptureMode>(mode)));
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream,
                                        cudaGraph_t* graph) {
  CONTEXT_CALL("cudaStreamEndCapture");
  return done(end_capture(handle(stream), reinterpret_cast<void**>(graph)));
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(
    cudaStreamCaptureMode* mode) {
  RUNTIME_CALL("cudaThreadExchangeStreamCaptureMode");
  CaptureMode before = exchange_capture_mode(static_cast<CaptureMode>(*mode));
  *mode = static_cast<cudaStreamCaptureMode>(before);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable,
                                                 cudaGraph_t,
                                                 unsigned long long) {
  CONTEXT_CALL("cudaGraphInstantiateWithFlags");
  *executable = static_cast<cudaGraphExec_t>(opaque_object());
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*,
                                     size_t* count) {
  CONTEXT_CALL("cudaGraphGetNodes");
  *count = 1;  // not empty: that is all that is known of a graph here
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event,
                                            unsigned flags) {
  CONTEXT_CALL("cudaEventCreateWithFlags");
  return done(create_event(reinterpret_cast<void**>(event), current_device(),
                           flags));
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) {
  CONTEXT_CALL("cudaEventCreate");
  return done(
      create_event(reinterpret_cast<void**>(event), current_device(), 0));
}
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  CONTEXT_CALL("cudaEventDestroy");
  return done(destroy_event(event));
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  CONTEXT_CALL("cudaEventRecord");
  return done(record_event(event, handle(stream)));
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event,
                                            cudaStream_t stream, unsigned) {
  CONTEXT_CALL("cudaEventRecordWithFlags");
  return done(record_event(event, handle(stream)));
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  CONTEXT_CALL("cudaEventQuery");
  return done(use_event(event, "cudaEventQuery"));
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  CONTEXT_CALL("cudaEventSynchronize");
  return done(use_event(event, "cudaEventSynchronize"));
}
EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from,
                                        cudaEvent_t to) {
  CONTEXT_CALL("cudaEventElapsedTime");
  return done(elapsed_time(from, to, milliseconds));
}

// ---- Refused by design: nobody else could open what these hand out

EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) {
  RUNTIME_CALL("cudaIpcGetMemHandle");
  return done(kNotSupported);
}
EXPORT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) {
  RUNTIME_CALL("cudaIpcGetEventHandle");
  return done(kNotSupported);
}
EXPORT cudaError_t cudaGetExportTable(const void** table, const cudaUUID_t*) {
  RUNTIME_CALL("cudaGetExportTable");
  *table = nullptr;
  return done(cudaErrorNotSupported);
}

// ---- The driver's functions through the runtime

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned version, unsigned long long,
    cudaDriverEntryPointQueryResult* status) {
  RUNTIME_CALL("cudaGetDriverEntryPointByVersion");
  *function = find_entry_point(name, static_cast<int>(version));
  if (status != nullptr) {
    *status = *function != nullptr ? cudaDriverEntryPointSuccess
                                   : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDriverEntryPoint(
    const char* name, void** function, unsigned long long flags,
    cudaDriverEntryPointQueryResult* status) {
  return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags,
                                          status);
}
