// SPDX-License-Identifier: Apache-2.0
// libcublas.so: handles that exist. Work is on the list of harmless calls.
#include <cstddef>

#include "front.h"

using namespace rehearsal;

namespace {

int status(int code) { return code; }

constexpr int kVersion = 130100;

}  // namespace

EXPORT int cublasCreate_v2(void** handle) {
  REHEARSAL_CALL("cublasCreate_v2", status);
  *handle = opaque_object();
  return 0;
}
EXPORT int cublasDestroy_v2(void* handle) {
  REHEARSAL_CALL("cublasDestroy_v2", status);
  std::free(handle);
  return 0;
}
EXPORT int cublasGetVersion_v2(void*, int* version) {
  *version = kVersion;
  return 0;
}
EXPORT int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return 0;
}
EXPORT int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return 0;
}
EXPORT int cublasGetStream_v2(void*, void** stream) {
  *stream = nullptr;
  return 0;
}
EXPORT const char* cublasGetStatusString(int code) {
  return code == 0 ? "success" : "cuBLAS error of a simulated card";
}
EXPORT const char* cublasGetStatusName(int code) {
  return code == 0 ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_NOT_SUPPORTED";
}
