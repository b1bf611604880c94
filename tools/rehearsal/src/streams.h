// SPDX-License-Identifier: Apache-2.0
// Streams, events and graph capture. Work is done when it is submitted, so a
// stream is always idle; what remains is identity, order of calls, capture.
#pragma once

#include <cstdint>

#include "memory.h"

namespace rehearsal {

enum class CaptureMode { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };
enum class CaptureStatus { kNone = 0, kActive = 1, kInvalidated = 2 };

struct StreamInfo {
  int device;
  int priority;
  unsigned flags;
  uint64_t id;
};

// Handles below 16 are the null, legacy and per-thread streams.
Result create_stream(void** stream, int device, unsigned flags, int priority);
Result destroy_stream(void* stream);
Result stream_info(void* stream, int current_device, StreamInfo* info);

Result begin_capture(void* stream, CaptureMode mode);
Result end_capture(void* stream, void** graph);
Result capture_status(void* stream, CaptureStatus* status, uint64_t* id,
                      void** graph);
CaptureMode exchange_capture_mode(CaptureMode mode);

// For calls that are forbidden while capturing. Each invalidates the captures
// that it disturbs, as the driver does.
Result synchronize_stream(void* stream);
Result synchronize_device();
Result unsafe_call();  // cudaMalloc and its like

Result create_event(void** event, int device, unsigned flags);
Result destroy_event(void* event);
Result record_event(void* event, void* stream);
Result use_event(void* event, const char* call);
Result elapsed_time(void* from, void* to, float* milliseconds);

struct StreamCensus {
  uint64_t streams;
  uint64_t events;
};
StreamCensus stream_census();

}  // namespace rehearsal
