// SPDX-License-Identifier: Apache-2.0
// libcublasLt.so: descriptors that exist, and one algorithm for everything.
#include <cublasLt.h>

#include <cstring>

#include "front.h"

using namespace rehearsal;

namespace {

cublasStatus_t status(int code) { return static_cast<cublasStatus_t>(code); }

template <typename Object>
cublasStatus_t make(Object** out) {
  *out = static_cast<Object*>(opaque_object(256));
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

EXPORT cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  REHEARSAL_CALL("cublasLtCreate", status);
  return make(handle);
}
EXPORT cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc,
                                               cublasComputeType_t,
                                               cudaDataType_t) {
  REHEARSAL_CALL("cublasLtMatmulDescCreate", status);
  return make(desc);
}
EXPORT cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout,
                                                 cudaDataType, uint64_t,
                                                 uint64_t, int64_t) {
  REHEARSAL_CALL("cublasLtMatrixLayoutCreate", status);
  return make(layout);
}
EXPORT cublasStatus_t cublasLtMatmulPreferenceCreate(
    cublasLtMatmulPreference_t* preference) {
  REHEARSAL_CALL("cublasLtMatmulPreferenceCreate", status);
  return make(preference);
}
EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
    cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
    cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t* results,
    int* count) {
  REHEARSAL_CALL("cublasLtMatmulAlgoGetHeuristic", status);
  std::memset(results, 0, sizeof *results);
  results->state = CUBLAS_STATUS_SUCCESS;
  results->wavesCount = 1.0f;
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT size_t cublasLtGetVersion() { return 130100; }
EXPORT const char* cublasLtGetStatusString(cublasStatus_t code) {
  return code == 0 ? "success" : "cuBLASLt error of a simulated card";
}
EXPORT const char* cublasLtGetStatusName(cublasStatus_t code) {
  return code == 0 ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_NOT_SUPPORTED";
}
