// SPDX-License-Identifier: Apache-2.0
#include "streams.h"

#include <chrono>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "ledger.h"

namespace rehearsal {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kEventTimingDisabled = 2;

struct Stream {
  StreamInfo info{};
  CaptureStatus capture = CaptureStatus::kNone;
  CaptureMode mode = CaptureMode::kGlobal;
  std::thread::id capturing_thread;
  uint64_t capture_id = 0;
  void* graph = nullptr;
};

struct Event {
  unsigned flags;
  bool recorded = false;
  Clock::time_point at;
};

struct Table {
  std::mutex mutex;
  std::unordered_map<void*, Stream> streams;
  std::unordered_map<void*, Event> events;
  uint64_t next = 0x100;
  int captures = 0;  // active ones
};

Table& table() {
  static Table* t = new Table;
  return *t;
}

using Lock = std::lock_guard<std::mutex>;

thread_local CaptureMode thread_mode = CaptureMode::kGlobal;

bool is_builtin(void* stream) {
  return reinterpret_cast<uintptr_t>(stream) < 16;
}

void* new_handle(Table& t) {
  // Never reused, so that a stale handle is always recognised.
  t.next += 0x100;
  return reinterpret_cast<void*>(uintptr_t{0x7e0000000000} + t.next);
}

Stream* find_stream(Table& t, void* stream, const char* call) {
  auto it = t.streams.find(stream);
  if (it != t.streams.end()) return &it->second;
  note_misuse("use_of_destroyed_stream", call,
              reinterpret_cast<uintptr_t>(stream));
  return nullptr;
}

void invalidate(Table& t, Stream& s) {
  if (s.capture == CaptureStatus::kActive) --t.captures;
  s.capture = CaptureStatus::kInvalidated;
}

}  // namespace

Result create_stream(void** stream, int device, unsigned flags, int priority) {
  Table& t = table();
  Lock lock(t.mutex);
  *stream = new_handle(t);
  t.streams[*stream].info = {device, priority, flags, t.next};
  return kSuccess;
}

Result destroy_stream(void* stream) {
  if (is_builtin(stream)) return kInvalidHandle;
  Table& t = table();
  Lock lock(t.mutex);
  Stream* s = find_stream(t, stream, "cudaStreamDestroy");
  if (s == nullptr) return kInvalidHandle;
  if (s->capture == CaptureStatus::kActive) --t.captures;
  t.streams.erase(stream);
  return kSuccess;
}

Result stream_info(void* stream, int current_device, StreamInfo* info) {
  if (is_builtin(stream)) {
    *info = {current_device, 0, 0, reinterpret_cast<uintptr_t>(stream)};
    return kSuccess;
  }
  Table& t = table();
  Lock lock(t.mutex);
  Stream* s = find_stream(t, stream, "stream query");
  if (s == nullptr) return kInvalidHandle;
  *info = s->info;
  return kSuccess;
}

Result begin_capture(void* stream, CaptureMode mode) {
  // The legacy stream cannot be captured.
  if (is_builtin(stream)) return kCaptureUnsupported;
  Table& t = table();
  Lock lock(t.mutex);
  Stream* s = find_stream(t, stream, "cudaStreamBeginCapture");
  if (s == nullptr) return kInvalidHandle;
  if (s->capture != CaptureStatus::kNone) return kInvalidValue;
  s->capture = CaptureStatus::kActive;
  s->mode = mode;
  s->capturing_thread = std::this_thread::get_id();
  s->capture_id = ++t.next;
  s->graph = new_handle(t);
  ++t.captures;
  return kSuccess;
}

Result end_capture(void* stream, void** graph) {
  *graph = nullptr;
  if (is_builtin(stream)) return kCaptureUnmatched;
  Table& t = table();
  Lock lock(t.mutex);
  Stream* s = find_stream(t, stream, "cudaStreamEndCapture");
  if (s == nullptr) return kInvalidHandle;
  if (s->capture == CaptureStatus::kNone) return kCaptureUnmatched;
  bool valid = s->capture == CaptureStatus::kActive;
  if (valid) {
    --t.captures;
    *graph = s->graph;
  }
  s->capture = CaptureStatus::kNone;
  return valid ? kSuccess : kCaptureInvalidated;
}

Result capture_status(void* stream, CaptureStatus* status, uint64_t* id,
                      void** graph) {
  *status = CaptureStatus::kNone;
  if (is_builtin(stream)) return kSuccess;
  Table& t = table();
  Lock lock(t.mutex);
  Stream* s = find_stream(t, stream, "cudaStreamIsCapturing");
  if (s == nullptr) return kInvalidHandle;
  *status = s->capture;
  if (s->capture != CaptureStatus::kNone) {
    if (id != nullptr) *id = s->capture_id;
    if (graph != nullptr) *graph = s->graph;
  }
  return kSuccess;
}

CaptureMode exchange_capture_mode(CaptureMode mode) {
  CaptureMode before = thread_mode;
  thread_mode = mode;
  return before;
}

Result synchronize_stream(void* stream) {
  if (is_builtin(stream)) return kSuccess;
  Table& t = table();
  Lock lock(t.mutex);
  Stream* s = find_stream(t, stream, "cudaStreamSynchronize");
  if (s == nullptr) return kInvalidHandle;
  if (s->capture == CaptureStatus::kNone) return kSuccess;
  invalidate(t, *s);
  return kCaptureUnsupported;
}

Result synchronize_device() {
  Table& t = table();
  Lock lock(t.mutex);
  if (t.captures == 0) return kSuccess;
  for (auto& [handle, s] : t.streams) {
    if (s.capture == CaptureStatus::kActive) invalidate(t, s);
  }
  return kCaptureUnsupported;
}

Result unsafe_call() {
  if (thread_mode == CaptureMode::kRelaxed) return kSuccess;
  Table& t = table();
  Lock lock(t.mutex);
  if (t.captures == 0) return kSuccess;
  auto self = std::this_thread::get_id();
  Result result = kSuccess;
  for (auto& [handle, s] : t.streams) {
    if (s.capture != CaptureStatus::kActive) continue;
    if (s.mode == CaptureMode::kRelaxed) continue;
    bool ours = s.capturing_thread == self;
    bool global = s.mode == CaptureMode::kGlobal &&
                  thread_mode == CaptureMode::kGlobal;
    if (!ours && !global) continue;
    invalidate(t, s);
    result = kCaptureUnsupported;
  }
  return result;
}

Result create_event(void** event, int, unsigned flags) {
  Table& t = table();
  Lock lock(t.mutex);
  *event = new_handle(t);
  t.events[*event] = Event{flags, false, {}};
  return kSuccess;
}

Result destroy_event(void* event) {
  Table& t = table();
  Lock lock(t.mutex);
  if (t.events.erase(event) != 0) return kSuccess;
  note_misuse("use_of_destroyed_event", "cudaEventDestroy",
              reinterpret_cast<uintptr_t>(event));
  return kInvalidHandle;
}

Result record_event(void* event, void* stream) {
  Table& t = table();
  Lock lock(t.mutex);
  if (!is_builtin(stream) &&
      find_stream(t, stream, "cudaEventRecord") == nullptr) {
    return kInvalidHandle;
  }
  auto it = t.events.find(event);
  if (it == t.events.end()) {
    note_misuse("use_of_destroyed_event", "cudaEventRecord",
                reinterpret_cast<uintptr_t>(event));
    return kInvalidHandle;
  }
  it->second.recorded = true;
  it->second.at = Clock::now();
  return kSuccess;
}

Result use_event(void* event, const char* call) {
  Table& t = table();
  Lock lock(t.mutex);
  if (t.events.count(event) != 0) return kSuccess;
  note_misuse("use_of_destroyed_event", call,
              reinterpret_cast<uintptr_t>(event));
  return kInvalidHandle;
}

Result elapsed_time(void* from, void* to, float* milliseconds) {
  Table& t = table();
  Lock lock(t.mutex);
  auto a = t.events.find(from), b = t.events.find(to);
  if (a == t.events.end() || b == t.events.end()) return kInvalidHandle;
  for (const Event* e : {&a->second, &b->second}) {
    if (!e->recorded || (e->flags & kEventTimingDisabled) != 0) {
      return kInvalidHandle;
    }
  }
  std::chrono::duration<float, std::milli> span = b->second.at - a->second.at;
  // Tuners divide by this: never zero.
  *milliseconds = span.count() + 1e-3f;
  return kSuccess;
}

StreamCensus stream_census() {
  Table& t = table();
  Lock lock(t.mutex);
  return {t.streams.size(), t.events.size()};
}

}  // namespace rehearsal
