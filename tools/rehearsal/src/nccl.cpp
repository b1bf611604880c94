// SPDX-License-Identifier: Apache-2.0
// libnccl.so.2: communicators that exist and move nothing. What one costs on
// the card is a calibration constant.
#include <cstring>

#include "card.h"
#include "config.h"
#include "context.h"
#include "front.h"
#include "memory.h"

using namespace rehearsal;

namespace {

enum Nccl : int { kOk = 0, kUnhandledCudaError = 1, kInvalidArgument = 4 };

struct UniqueId {
  char bytes[128];
};

struct Communicator {
  int ranks;
  int rank;
  int device;
  size_t charged;
};

int nccl(int code) { return code; }

int make_communicator(void** out, int ranks, int rank) {
  if (ensure_context() != kSuccess) return kUnhandledCudaError;
  int device = current_device();
  size_t bytes = config().communicator;
  if (!card(device).take(bytes)) return kUnhandledCudaError;
  *out = new Communicator{ranks, rank, device, bytes};
  return kOk;
}

int drop_communicator(void* communicator) {
  auto* c = static_cast<Communicator*>(communicator);
  card(c->device).give(c->charged);
  delete c;
  return kOk;
}

}  // namespace

#define NCCL_CALL(name) REHEARSAL_CALL(name, nccl)

EXPORT int ncclGetVersion(int* version) {
  *version = 22700;
  return kOk;
}
EXPORT int ncclGetUniqueId(UniqueId* id) {
  NCCL_CALL("ncclGetUniqueId");
  std::memset(id, 1, sizeof *id);
  return kOk;
}
EXPORT int ncclCommInitRank(void** out, int ranks, UniqueId, int rank) {
  NCCL_CALL("ncclCommInitRank");
  return make_communicator(out, ranks, rank);
}
EXPORT int ncclCommInitRankConfig(void** out, int ranks, UniqueId, int rank,
                                  void*) {
  NCCL_CALL("ncclCommInitRankConfig");
  return make_communicator(out, ranks, rank);
}
EXPORT int ncclCommDestroy(void* communicator) {
  NCCL_CALL("ncclCommDestroy");
  return drop_communicator(communicator);
}
EXPORT int ncclCommAbort(void* communicator) {
  NCCL_CALL("ncclCommAbort");
  return drop_communicator(communicator);
}
EXPORT int ncclCommCount(Communicator* c, int* count) {
  *count = c->ranks;
  return kOk;
}
EXPORT int ncclCommUserRank(Communicator* c, int* rank) {
  *rank = c->rank;
  return kOk;
}
EXPORT int ncclCommCuDevice(Communicator* c, int* device) {
  *device = c->device;
  return kOk;
}
EXPORT int ncclCommGetAsyncError(Communicator*, int* error) {
  *error = kOk;
  return kOk;
}
EXPORT const char* ncclGetErrorString(int code) {
  return code == kOk ? "no error" : "NCCL error of a simulated card";
}
EXPORT const char* ncclGetLastError(Communicator*) { return ""; }
EXPORT int ncclMemAlloc(void** address, size_t size) {
  NCCL_CALL("ncclMemAlloc");
  if (ensure_context() != kSuccess) return kUnhandledCudaError;
  uintptr_t at = 0;
  if (allocate(&at, size, current_device()) != kSuccess) {
    return kUnhandledCudaError;
  }
  *address = reinterpret_cast<void*>(at);
  return kOk;
}
EXPORT int ncclMemFree(void* address) {
  NCCL_CALL("ncclMemFree");
  return free_allocation(address_of(address)) == kSuccess ? kOk
                                                          : kInvalidArgument;
}
