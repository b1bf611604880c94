// SPDX-License-Identifier: Apache-2.0
// libcuda.so.1: the driver. cuda.h renames each function to its current ABI
// version, and so do the definitions below.
#include <cuda.h>

#include <cstdio>
#include <cstring>

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

CUresult done(Result result) { return static_cast<CUresult>(result); }

CUresult need_initialized() {
  return is_initialized() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult need_context() {
  if (CUresult e = need_initialized()) return e;
  return current_context() != nullptr ? CUDA_SUCCESS
                                      : CUDA_ERROR_INVALID_CONTEXT;
}

void* handle(CUstream stream) { return reinterpret_cast<void*>(stream); }

struct ErrorText {
  CUresult code;
  const char* name;
  const char* text;
};

constexpr ErrorText kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED",
     "initialization error"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE",
     "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT",
     "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE",
     "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS",
     "an illegal memory access was encountered"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
     "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
     "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED",
     "operation not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
     "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
     "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
     "capture was not initiated in this stream"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorText* find_error(CUresult code) {
  for (const ErrorText& e : kErrors) {
    if (e.code == code) return &e;
  }
  return nullptr;
}

}  // namespace

#define DRIVER_CALL(name) REHEARSAL_CALL(name, CUresult)
#define INITIALIZED_CALL(name)                  \
  DRIVER_CALL(name);                            \
  if (CUresult e = need_initialized()) return e
#define CONTEXT_CALL(name)                      \
  DRIVER_CALL(name);                            \
  if (CUresult e = need_context()) return e
#define DEVICE(device) \
  if (!device_exists(device)) return CUDA_ERROR_INVALID_DEVICE

// ---- Library, errors, entry points

EXPORT CUresult cuInit(unsigned) {
  DRIVER_CALL("cuInit");
  initialize();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDriverGetVersion(int* version) {
  DRIVER_CALL("cuDriverGetVersion");
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult code, const char** text) {
  const ErrorText* e = find_error(code);
  *text = e != nullptr ? e->text : nullptr;
  return e != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorName(CUresult code, const char** text) {
  const ErrorText* e = find_error(code);
  *text = e != nullptr ? e->name : nullptr;
  return e != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetProcAddress(const char* name, void** function, int version,
                                 cuuint64_t,
                                 CUdriverProcAddressQueryResult* status) {
  DRIVER_CALL("cuGetProcAddress");
  *function = find_entry_point(name, version);
  bool found = *function != nullptr;
  if (status != nullptr) {
    *status = found ? CU_GET_PROC_ADDRESS_SUCCESS
                    : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  return found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// A statically linked runtime asks for private tables here. It must be told
// no: a table that is not there would be called.
EXPORT CUresult cuGetExportTable(const void** table, const CUuuid*) {
  DRIVER_CALL("cuGetExportTable");
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuLogsRegisterCallback(CUlogsCallback, void*,
                                       CUlogsCallbackHandle* callback) {
  DRIVER_CALL("cuLogsRegisterCallback");
  if (callback != nullptr) {
    *callback = static_cast<CUlogsCallbackHandle>(opaque_object());
  }
  return CUDA_SUCCESS;
}

// ---- Devices and contexts

EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  INITIALIZED_CALL("cuDeviceGet");
  DEVICE(ordinal);
  *device = ordinal;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int* count) {
  INITIALIZED_CALL("cuDeviceGetCount");
  *count = config().cards;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  INITIALIZED_CALL("cuDeviceGetName");
  DEVICE(device);
  std::snprintf(name, length, "%s", config().name.c_str());
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  INITIALIZED_CALL("cuDeviceGetUuid");
  DEVICE(device);
  device_uuid(device, uuid->bytes);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) {
  INITIALIZED_CALL("cuDeviceTotalMem");
  DEVICE(device);
  *bytes = config().memory;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                                     CUdevice device) {
  INITIALIZED_CALL("cuDeviceGetAttribute");
  DEVICE(device);
  *value = device_attribute(attribute, device);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetPCIBusId(char* text, int length, CUdevice device) {
  INITIALIZED_CALL("cuDeviceGetPCIBusId");
  DEVICE(device);
  std::snprintf(text, length, "0000:%02x:00.0", device + 1);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  INITIALIZED_CALL("cuDevicePrimaryCtxRetain");
  DEVICE(device);
  if (!card(device).open_context()) return CUDA_ERROR_OUT_OF_MEMORY;
  *context = static_cast<CUcontext>(primary_context(device));
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  INITIALIZED_CALL("cuDevicePrimaryCtxRelease");
  DEVICE(device);
  return CUDA_SUCCESS;  // the runtime holds it as well
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags,
                                           int* active) {
  INITIALIZED_CALL("cuDevicePrimaryCtxGetState");
  DEVICE(device);
  if (flags != nullptr) *flags = 0;
  if (active != nullptr) *active = card(device).has_context() ? 1 : 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  INITIALIZED_CALL("cuCtxGetCurrent");
  *context = static_cast<CUcontext>(current_context());
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  INITIALIZED_CALL("cuCtxSetCurrent");
  if (context != nullptr && context_device(context) < 0) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  set_current_context(context);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent(CUcontext context) {
  INITIALIZED_CALL("cuCtxPushCurrent");
  if (context_device(context) < 0) return CUDA_ERROR_INVALID_CONTEXT;
  push_context(context);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent(CUcontext* context) {
  INITIALIZED_CALL("cuCtxPopCurrent");
  void* popped = nullptr;
  Result result = pop_context(&popped);
  if (context != nullptr) *context = static_cast<CUcontext>(popped);
  return done(result);
}

EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  CONTEXT_CALL("cuCtxGetDevice");
  *device = current_device();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSynchronize() {
  CONTEXT_CALL("cuCtxSynchronize");
  return done(synchronize_device());
}

// ---- Memory

EXPORT CUresult cuMemGetInfo(size_t* free, size_t* total) {
  CONTEXT_CALL("cuMemGetInfo");
  *free = card(current_device()).free();
  *total = config().memory;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAlloc(CUdeviceptr* address, size_t size) {
  CONTEXT_CALL("cuMemAlloc");
  if (size == 0) return CUDA_ERROR_INVALID_VALUE;
  if (Result r = unsafe_call()) return done(r);
  uintptr_t at = 0;
  Result result = allocate(&at, size, current_device());
  if (result == kSuccess) *address = at;
  return done(result);
}

EXPORT CUresult cuMemFree(CUdeviceptr address) {
  CONTEXT_CALL("cuMemFree");
  if (address == 0) return CUDA_SUCCESS;
  if (Result r = unsafe_call()) return done(r);
  return done(free_allocation(address));
}

EXPORT CUresult cuMemGetAllocationGranularity(
    size_t* granularity, const CUmemAllocationProp*,
    CUmemAllocationGranularity_flags) {
  INITIALIZED_CALL("cuMemGetAllocationGranularity");
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                            const CUmemAllocationProp* properties,
                            unsigned long long flags) {
  INITIALIZED_CALL("cuMemCreate");
  if (flags != 0 || properties == nullptr) return CUDA_ERROR_INVALID_VALUE;
  int device = kHostMemory;
  if (properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
    device = properties->location.id;
    DEVICE(device);
  }
  uint64_t created = 0;
  Result result = create_handle(&created, size, device);
  if (result == kSuccess) *handle = created;
  return done(result);
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  INITIALIZED_CALL("cuMemRelease");
  return done(release_handle(handle));
}

EXPORT CUresult cuMemRetainAllocationHandle(
    CUmemGenericAllocationHandle* handle, void* address) {
  INITIALIZED_CALL("cuMemRetainAllocationHandle");
  uint64_t retained = 0;
  Result result = retain_handle(&retained, address_of(address));
  if (result == kSuccess) *handle = retained;
  return done(result);
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(
    CUmemAllocationProp* properties, CUmemGenericAllocationHandle handle) {
  INITIALIZED_CALL("cuMemGetAllocationPropertiesFromHandle");
  int device = 0;
  if (Result r = handle_device(handle, &device)) return done(r);
  std::memset(properties, 0, sizeof *properties);
  properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  bool host = device == kHostMemory;
  properties->location.type =
      host ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
  properties->location.id = host ? 0 : device;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size,
                                    size_t alignment, CUdeviceptr wanted,
                                    unsigned long long flags) {
  INITIALIZED_CALL("cuMemAddressReserve");
  // The wished-for address is a hint, which the driver may ignore as well.
  (void)wanted;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  uintptr_t at = 0;
  Result result = reserve_addresses(&at, size, alignment);
  if (result == kSuccess) *address = at;
  return done(result);
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  INITIALIZED_CALL("cuMemAddressFree");
  return done(free_addresses(address, size));
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                         CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
  INITIALIZED_CALL("cuMemMap");
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return done(map_handle(address, size, offset, handle));
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t size,
                               const CUmemAccessDesc* access, size_t count) {
  INITIALIZED_CALL("cuMemSetAccess");
  if (access == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  return done(set_access(address, size));
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  INITIALIZED_CALL("cuMemUnmap");
  return done(unmap_range(address, size));
}

// Memory of a card that does not exist cannot be shared with a process that
// would look for it: refused by design.
EXPORT CUresult cuMemExportToShareableHandle(void*,
                                             CUmemGenericAllocationHandle,
                                             CUmemAllocationHandleType,
                                             unsigned long long) {
  DRIVER_CALL("cuMemExportToShareableHandle");
  return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* size,
                                     CUdeviceptr address) {
  CONTEXT_CALL("cuMemGetAddressRange");
  auto range = reservation_at(address);
  if (!range) return CUDA_ERROR_INVALID_VALUE;
  if (base != nullptr) *base = range->base;
  if (size != nullptr) *size = range->size;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute,
                                      CUdeviceptr address) {
  INITIALIZED_CALL("cuPointerGetAttribute");
  auto region = region_at(address);
  auto host = host_region_at(address);
  if (!region && !host) return CUDA_ERROR_INVALID_VALUE;
  int device = region ? region->device : current_device();
  auto range = reservation_at(address);
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<void**>(value) = primary_context(device);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(value) =
          region ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      *static_cast<CUdeviceptr*>(value) = address;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(value) = device;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      *static_cast<int*>(value) = 0;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      *static_cast<int*>(value) = 1;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      *static_cast<unsigned long long*>(value) =
          range ? range->base : host ? host->base : 0;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      *static_cast<CUdeviceptr*>(value) =
          range ? range->base : host ? host->base : 0;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      *static_cast<size_t*>(value) = range ? range->size : host ? host->size : 0;
      return CUDA_SUCCESS;
    default:
      note_misuse("unknown_pointer_attribute", "cuPointerGetAttribute",
                  attribute);
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

EXPORT CUresult cuMemHostAlloc(void** address, size_t size, unsigned) {
  CONTEXT_CALL("cuMemHostAlloc");
  return done(host_allocate(address, size));
}

EXPORT CUresult cuMemAllocHost(void** address, size_t size) {
  CONTEXT_CALL("cuMemAllocHost");
  return done(host_allocate(address, size));
}

EXPORT CUresult cuMemFreeHost(void* address) {
  CONTEXT_CALL("cuMemFreeHost");
  return done(host_free(address));
}

EXPORT CUresult cuMemHostRegister(void* address, size_t size, unsigned) {
  CONTEXT_CALL("cuMemHostRegister");
  return done(host_register(address, size));
}

EXPORT CUresult cuMemHostUnregister(void* address) {
  CONTEXT_CALL("cuMemHostUnregister");
  return done(host_unregister(address));
}

EXPORT CUresult cuMemHostGetDevicePointer(CUdeviceptr* device, void* host,
                                          unsigned) {
  CONTEXT_CALL("cuMemHostGetDevicePointer");
  if (!host_region_at(address_of(host))) return CUDA_ERROR_INVALID_VALUE;
  *device = address_of(host);
  return CUDA_SUCCESS;
}

// ---- Copies and fills

#define COPY(name, to, from, size) \
  CONTEXT_CALL(name);              \
  return done(copy(name, to, from, size))

EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size) {
  COPY("cuMemcpy", to, from, size);
}
EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size,
                              CUstream) {
  COPY("cuMemcpyAsync", to, from, size);
}
EXPORT CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t size) {
  COPY("cuMemcpyDtoH", address_of(to), from, size);
}
EXPORT CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t size,
                                  CUstream) {
  COPY("cuMemcpyDtoHAsync", address_of(to), from, size);
}
EXPORT CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t size) {
  COPY("cuMemcpyHtoD", to, address_of(from), size);
}
EXPORT CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t size,
                                  CUstream) {
  COPY("cuMemcpyHtoDAsync", to, address_of(from), size);
}
EXPORT CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t size) {
  COPY("cuMemcpyDtoD", to, from, size);
}
EXPORT CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size,
                                  CUstream) {
  COPY("cuMemcpyDtoDAsync", to, from, size);
}

#define FILL(name, to, value, width, count) \
  CONTEXT_CALL(name);                       \
  return done(fill(name, to, value, width, count))

EXPORT CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t count) {
  FILL("cuMemsetD8", to, value, 1, count);
}
EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value,
                                size_t count, CUstream) {
  FILL("cuMemsetD8Async", to, value, 1, count);
}
EXPORT CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value,
                                 size_t count, CUstream) {
  FILL("cuMemsetD16Async", to, value, 2, count);
}
EXPORT CUresult cuMemsetD32(CUdeviceptr to, unsigned value, size_t count) {
  FILL("cuMemsetD32", to, value, 4, count);
}
EXPORT CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count,
                                 CUstream) {
  FILL("cuMemsetD32Async", to, value, 4, count);
}

// ---- Modules and kernels

EXPORT CUresult cuModuleLoadData(CUmodule* module, const void*) {
  CONTEXT_CALL("cuModuleLoadData");
  *module = static_cast<CUmodule>(opaque_object());
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned,
                                   CUjit_option*, void**) {
  CONTEXT_CALL("cuModuleLoadDataEx");
  *module = static_cast<CUmodule>(opaque_object());
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoad(CUmodule* module, const char*) {
  CONTEXT_CALL("cuModuleLoad");
  *module = static_cast<CUmodule>(opaque_object());
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule,
                                    const char*) {
  CONTEXT_CALL("cuModuleGetFunction");
  *function = static_cast<CUfunction>(opaque_object());
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleGetGlobal(CUdeviceptr* address, size_t* size, CUmodule,
                                  const char* name) {
  CONTEXT_CALL("cuModuleGetGlobal");
  ModuleVariable v = variable_by_name(name);
  if (address != nullptr) *address = v.address;
  if (size != nullptr) *size = v.size;
  return v.address != 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
EXPORT CUresult cuLibraryLoadData(CUlibrary* library, const void*,
                                  CUjit_option*, void**, unsigned,
                                  CUlibraryOption*, void**, unsigned) {
  INITIALIZED_CALL("cuLibraryLoadData");
  *library = static_cast<CUlibrary>(opaque_object());
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLibraryLoadFromFile(CUlibrary* library, const char*,
                                      CUjit_option*, void**, unsigned,
                                      CUlibraryOption*, void**, unsigned) {
  INITIALIZED_CALL("cuLibraryLoadFromFile");
  *library = static_cast<CUlibrary>(opaque_object());
  return CUDA_SUCCESS;
}
// Those who compile a kernel and then ask what is in it expect just that one.
EXPORT CUresult cuLibraryGetKernelCount(unsigned* count, CUlibrary) {
  INITIALIZED_CALL("cuLibraryGetKernelCount");
  *count = 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLibraryEnumerateKernels(CUkernel* kernels, unsigned count,
                                          CUlibrary) {
  INITIALIZED_CALL("cuLibraryEnumerateKernels");
  for (unsigned i = 0; i < count; ++i) {
    kernels[i] = static_cast<CUkernel>(opaque_object());
  }
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary, const char*) {
  INITIALIZED_CALL("cuLibraryGetKernel");
  *kernel = static_cast<CUkernel>(opaque_object());
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLibraryGetModule(CUmodule* module, CUlibrary library) {
  INITIALIZED_CALL("cuLibraryGetModule");
  *module = reinterpret_cast<CUmodule>(library);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  INITIALIZED_CALL("cuKernelGetFunction");
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute,
                                   CUfunction) {
  INITIALIZED_CALL("cuFuncGetAttribute");
  *value = kernel_attribute(attribute);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuKernelGetAttribute(int* value, CUfunction_attribute attribute,
                                     CUkernel, CUdevice) {
  INITIALIZED_CALL("cuKernelGetAttribute");
  *value = kernel_attribute(attribute);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks,
                                                            CUfunction,
                                                            int threads,
                                                            size_t) {
  INITIALIZED_CALL("cuOccupancyMaxActiveBlocksPerMultiprocessor");
  *blocks = resident_blocks(threads);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, CUfunction, int threads, size_t, unsigned) {
  INITIALIZED_CALL("cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags");
  *blocks = resident_blocks(threads);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction,
                                             const CUlaunchConfig*) {
  INITIALIZED_CALL("cuOccupancyMaxActiveClusters");
  *clusters = 8;
  return CUDA_SUCCESS;
}

#define LAUNCH(name)              \
  CONTEXT_CALL(name);             \
  card(current_device()).launch(); \
  return CUDA_SUCCESS

EXPORT CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned,
                               unsigned, unsigned, unsigned, unsigned, CUstream,
                               void**, void**) {
  LAUNCH("cuLaunchKernel");
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction, void**,
                                 void**) {
  LAUNCH("cuLaunchKernelEx");
}
EXPORT CUresult cuLaunchCooperativeKernel(CUfunction, unsigned, unsigned,
                                          unsigned, unsigned, unsigned,
                                          unsigned, unsigned, CUstream,
                                          void**) {
  LAUNCH("cuLaunchCooperativeKernel");
}
EXPORT CUresult cuLaunchHostFunc(CUstream, CUhostFn function, void* data) {
  CONTEXT_CALL("cuLaunchHostFunc");
  function(data);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
    const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
    CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
    CUtensorMapFloatOOBfill) {
  INITIALIZED_CALL("cuTensorMapEncodeTiled");
  std::memset(map, 0, sizeof *map);
  return CUDA_SUCCESS;
}

// ---- Streams and events

EXPORT CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  CONTEXT_CALL("cuStreamCreate");
  return done(create_stream(reinterpret_cast<void**>(stream), current_device(),
                            flags, 0));
}
EXPORT CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags,
                                           int priority) {
  CONTEXT_CALL("cuStreamCreateWithPriority");
  return done(create_stream(reinterpret_cast<void**>(stream), current_device(),
                            flags, priority));
}
EXPORT CUresult cuStreamDestroy(CUstream stream) {
  CONTEXT_CALL("cuStreamDestroy");
  return done(destroy_stream(handle(stream)));
}
EXPORT CUresult cuStreamSynchronize(CUstream stream) {
  CONTEXT_CALL("cuStreamSynchronize");
  return done(synchronize_stream(handle(stream)));
}
EXPORT CUresult cuStreamQuery(CUstream stream) {
  CONTEXT_CALL("cuStreamQuery");
  return done(synchronize_stream(handle(stream)));
}
EXPORT CUresult cuStreamWaitEvent(CUstream, CUevent event, unsigned) {
  CONTEXT_CALL("cuStreamWaitEvent");
  return done(use_event(event, "cuStreamWaitEvent"));
}
EXPORT CUresult cuStreamIsCapturing(CUstream stream,
                                    CUstreamCaptureStatus* status) {
  CONTEXT_CALL("cuStreamIsCapturing");
  CaptureStatus s;
  Result result = capture_status(handle(stream), &s, nullptr, nullptr);
  *status = static_cast<CUstreamCaptureStatus>(s);
  return done(result);
}
EXPORT CUresult cuStreamGetCaptureInfo(CUstream stream,
                                       CUstreamCaptureStatus* status,
                                       cuuint64_t* id, CUgraph* graph,
                                       const CUgraphNode** dependencies,
                                       const CUgraphEdgeData** edges,
                                       size_t* count) {
  CONTEXT_CALL("cuStreamGetCaptureInfo");
  CaptureStatus s;
  uint64_t capture = 0;
  void* captured = nullptr;
  Result result = capture_status(handle(stream), &s, &capture, &captured);
  *status = static_cast<CUstreamCaptureStatus>(s);
  if (id != nullptr) *id = capture;
  if (graph != nullptr) *graph = static_cast<CUgraph>(captured);
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return done(result);
}
EXPORT CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  CONTEXT_CALL("cuStreamGetCtx");
  StreamInfo info;
  Result result = stream_info(handle(stream), current_device(), &info);
  if (result == kSuccess) {
    *context = static_cast<CUcontext>(primary_context(info.device));
  }
  return done(result);
}
EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  INITIALIZED_CALL("cuThreadExchangeStreamCaptureMode");
  CaptureMode before = exchange_capture_mode(static_cast<CaptureMode>(*mode));
  *mode = static_cast<CUstreamCaptureMode>(before);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventCreate(CUevent* event, unsigned flags) {
  CONTEXT_CALL("cuEventCreate");
  return done(create_event(reinterpret_cast<void**>(event), current_device(),
                           flags));
}
EXPORT CUresult cuEventDestroy(CUevent event) {
  CONTEXT_CALL("cuEventDestroy");
  return done(destroy_event(event));
}
EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
  CONTEXT_CALL("cuEventRecord");
  return done(record_event(event, handle(stream)));
}
EXPORT CUresult cuEventQuery(CUevent event) {
  CONTEXT_CALL("cuEventQuery");
  return done(use_event(event, "cuEventQuery"));
}
EXPORT CUresult cuEventSynchronize(CUevent event) {
  CONTEXT_CALL("cuEventSynchronize");
  return done(use_event(event, "cuEventSynchronize"));
}
EXPORT CUresult cuEventElapsedTime(float* milliseconds, CUevent from,
                                   CUevent to) {
  CONTEXT_CALL("cuEventElapsedTime");
  return done(elapsed_time(from, to, milliseconds));
}
