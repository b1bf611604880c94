// SPDX-License-Identifier: Apache-2.0
// The state that a thread must be in for a call to the driver, and the wait for
// a segment's last users.
#pragma once

#include "driver.h"

#include <array>
#include <atomic>

namespace cumem {

constexpr int kMaxDevices = 128;

// The primary context of `device`, retained once and kept.
inline Status primary_context(int device, CUcontext* context) {
  static std::array<std::atomic<CUcontext>, kMaxDevices> retained{};
  if (device < 0 || device >= kMaxDevices) {
    return Status::refused("no device has the number " +
                           std::to_string(device));
  }
  *context = retained[device].load(std::memory_order_acquire);
  if (*context != nullptr) return {};
  Status status = CUMEM_CALL(cuDevicePrimaryCtxRetain, context, device);
  // Two threads may both retain it; the context lives as long as the process
  // either way.
  if (status.ok()) retained[device].store(*context, std::memory_order_release);
  return status;
}

// While alive: the calling thread works on `device`, and no call invalidates
// another thread's capture. Restores both on exit.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    // PyTorch asks for memory inside captures too. Creating, mapping and
    // unmapping are "potentially unsafe" calls, which a relaxed thread may
    // make without harm to a capture that is open here or on another thread.
    relaxed_ =
        driver().cuThreadExchangeStreamCaptureMode(&mode_) == CUDA_SUCCESS;
    status_ = enter(device);
  }

  ~DeviceScope() {
    if (switched_) driver().cuCtxSetCurrent(previous_);
    if (relaxed_) driver().cuThreadExchangeStreamCaptureMode(&mode_);
  }

  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  const Status& status() const { return status_; }

 private:
  Status enter(int device) {
    Status status = CUMEM_CALL(cuCtxGetCurrent, &previous_);
    if (!status.ok()) return status;
    if (previous_ != nullptr) {
      CUdevice current = -1;
      status = CUMEM_CALL(cuCtxGetDevice, &current);
      if (!status.ok() || current == device) return status;
    }
    CUcontext wanted = nullptr;
    status = primary_context(device, &wanted);
    if (status.ok()) status = CUMEM_CALL(cuCtxSetCurrent, wanted);
    switched_ = status.ok();
    return status;
  }

  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool relaxed_ = false;
  CUcontext previous_ = nullptr;
  bool switched_ = false;
  Status status_;
};

// Whether `stream` is being captured, or cannot be used because another is.
inline Status ask_capturing(CUstream stream, bool* capturing) {
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult asked = driver().cuStreamIsCapturing(stream, &capture);
  // The legacy stream cannot be waited for while a blocking stream captures.
  *capturing = asked == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT ||
               capture != CU_STREAM_CAPTURE_STATUS_NONE;
  return *capturing || asked == CUDA_SUCCESS
             ? Status()
             : Status::failed("cuStreamIsCapturing", asked);
}

inline Status wait_unless_capturing(CUstream stream, bool* capturing) {
  Status status = ask_capturing(stream, capturing);
  if (*capturing || !status.ok()) return status;
  return CUMEM_CALL(cuStreamSynchronize, stream);
}

// Waits until nothing uses a segment that was allocated for `stream`, so that
// it can be unmapped: unlike cudaFree, cuMemUnmap does not wait by itself.
//
// Not cuCtxSynchronize: it invalidates every capture open on the device, on any
// thread and in any mode. The allocator's caller frees memory once its own
// stream may reuse it and all recorded streams are done with it, so that stream
// is enough; the default stream is added for work that was never recorded.
inline Status wait_for_users(CUstream stream) {
  bool capturing = false;
  Status status = wait_unless_capturing(stream, &capturing);
  if (capturing || stream == nullptr) return status;
  status.also(wait_unless_capturing(nullptr, &capturing));
  return status;
}

}  // namespace cumem
