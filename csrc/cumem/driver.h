// SPDX-License-Identifier: Apache-2.0
// The CUDA driver, opened when it is first needed and never linked, so that
// the extension loads on a machine without one.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include <string>
#include <utility>

namespace cumem {

// Every driver function that the allocator calls.
#define CUMEM_DRIVER_FUNCTIONS(F)      \
  F(cuGetErrorName)                    \
  F(cuCtxGetCurrent)                   \
  F(cuCtxSetCurrent)                   \
  F(cuCtxGetDevice)                    \
  F(cuDevicePrimaryCtxRetain)          \
  F(cuDeviceGetAttribute)              \
  F(cuThreadExchangeStreamCaptureMode) \
  F(cuStreamIsCapturing)               \
  F(cuStreamSynchronize)               \
  F(cuMemGetAllocationGranularity)     \
  F(cuMemAddressReserve)               \
  F(cuMemAddressFree)                  \
  F(cuMemCreate)                       \
  F(cuMemRelease)                      \
  F(cuMemMap)                          \
  F(cuMemUnmap)                        \
  F(cuMemSetAccess)

struct Driver {
#define CUMEM_MEMBER(name) decltype(&::name) name = nullptr;
  CUMEM_DRIVER_FUNCTIONS(CUMEM_MEMBER)
#undef CUMEM_MEMBER

  // Why the driver cannot be used; empty when it can.
  std::string missing;
};

// Two steps, so that a name that cuda.h maps to a versioned one is expanded
// before it becomes the string that dlsym looks up.
#define CUMEM_SYMBOL_TEXT(name) #name
#define CUMEM_SYMBOL(name) CUMEM_SYMBOL_TEXT(name)

inline Driver* open_driver() {
  // Never destroyed and never closed: PyTorch frees memory from static
  // destructors, after everything else of the process has gone.
  auto* driver = new Driver;
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) {
    const char* reason = dlerror();
    driver->missing = reason ? reason : "libcuda.so.1 cannot be opened";
    return driver;
  }
#define CUMEM_LOAD(name)                                                       \
  driver->name =                                                               \
      reinterpret_cast<decltype(&::name)>(dlsym(library, CUMEM_SYMBOL(name))); \
  if (driver->name == nullptr && driver->missing.empty()) {                    \
    driver->missing = "libcuda.so.1 has no " CUMEM_SYMBOL(name);               \
  }
  CUMEM_DRIVER_FUNCTIONS(CUMEM_LOAD)
#undef CUMEM_LOAD
  return driver;
}

// The process's driver. Check `missing` before the first call through it.
inline const Driver& driver() {
  static const Driver* const opened = open_driver();
  return *opened;
}

// What went wrong in one request: nothing, one failed call, or one failed call
// and what then failed while undoing.
class Status {
 public:
  static Status failed(const char* call, CUresult code) {
    const char* name = nullptr;
    if (driver().cuGetErrorName(code, &name) != CUDA_SUCCESS || !name) {
      name = "an error without a name";
    }
    Status status;
    status.code_ = code;
    status.text_ = std::string(call) + " failed with " + name + " (" +
                   std::to_string(static_cast<int>(code)) + ")";
    return status;
  }

  static Status refused(std::string why) {
    Status status;
    status.code_ = CUDA_ERROR_INVALID_VALUE;
    status.text_ = std::move(why);
    return status;
  }

  bool ok() const { return text_.empty(); }

  // True when the driver has shut down, as it does before the last static
  // destructors run; everything it held is gone by then.
  bool driver_is_gone() const { return code_ == CUDA_ERROR_DEINITIALIZED; }

  const std::string& text() const { return text_; }

  // Keeps the first failure's code; later failures only add to the text.
  void also(const Status& other) {
    if (other.ok()) return;
    if (ok()) {
      *this = other;
    } else {
      text_ += "; then " + other.text_;
    }
  }

  Status with(const std::string& detail) && {
    if (!ok()) text_ += detail;
    return std::move(*this);
  }

 private:
  CUresult code_ = CUDA_SUCCESS;
  std::string text_;
};

// Calls one driver function by name and turns its result into a Status.
#define CUMEM_CALL(name, ...)                                               \
  ([&]() -> ::cumem::Status {                                               \
    const CUresult result = ::cumem::driver().name(__VA_ARGS__);            \
    return result == CUDA_SUCCESS ? ::cumem::Status()                       \
                                  : ::cumem::Status::failed(#name, result); \
  }())

}  // namespace cumem
