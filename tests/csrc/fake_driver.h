// SPDX-License-Identifier: Apache-2.0
// How tests steer the fake driver and see what it saw.
#pragma once

#include <sys/types.h>

#include <cstdint>

#define FAKE_API extern "C" __attribute__((visibility("default")))

// An empty driver: devices 0 and 1 with `mib` MiB each, nothing retained, no
// current context on the calling thread but that of device 0.
FAKE_API void fake_reset(std::uint64_t mib);

// The `nth` call (1 = the next) of the named function, and the `times` - 1
// after it, change nothing and return `code`. With `times` 0 none fails any
// more.
FAKE_API void fake_fail(const char* function, int nth, int times, int code);

// How often the named function was called since the last reset.
FAKE_API int fake_calls(const char* function);

// "handles" (not released), "mappings", "reservations", "used" (bytes of both
// devices), "violations" (calls that a real driver must never see), "captures",
// "broken_captures", "injected" (failures that fake_fail caused).
FAKE_API std::uint64_t fake_count(const char* what);

// The violations, one a line.
FAKE_API const char* fake_violations();

// "fabric": devices support fabric handles. "fabric_denied": but creating
// memory with one is not permitted. "rdma": devices support GPUDirect RDMA.
// "gone": the driver has shut down.
FAKE_API void fake_set(const char* option, int value);

// What the last cuMemCreate asked for: its handle types, RDMA flag.
FAKE_API int fake_last_handle_types();
FAKE_API int fake_last_rdma();

// The calling thread's context: the device, or -1 for none.
FAKE_API void fake_set_current(int device);
FAKE_API int fake_current();

// A kernel on `stream` that uses memory at `address` until the stream is waited
// for. Unmapping that memory before is a violation.
FAKE_API void fake_launch(void* stream, std::uint64_t address);

// A capture by the calling thread in the default (global) mode. Ending it
// returns 1 if it is still valid.
FAKE_API void fake_begin_capture(void* stream, int blocking);
FAKE_API int fake_end_capture(void* stream);

// Makes the calls of the named function wait until fake_open_gate(), and says
// how many wait now.
FAKE_API void fake_close_gate(const char* function);
FAKE_API int fake_waiting();
FAKE_API void fake_open_gate();

// Whether these addresses are reserved, and mapped with access.
FAKE_API int fake_is_reserved(std::uint64_t address);
FAKE_API int fake_is_usable(std::uint64_t address);

using fake_malloc_t = void*(ssize_t size, int device, void* stream);
using fake_free_t = void(void* pointer, ssize_t size, int device, void* stream);

// Allocates and frees on a thread that Python does not know. 0 if that did not
// end within the time given; it then goes on by itself.
FAKE_API int fake_cycle_in_thread(fake_malloc_t* allocate, fake_free_t* release,
                                  int milliseconds);

// Frees the memory when static destructors run, after Python has ended, and
// prints what is left.
FAKE_API void fake_free_at_exit(fake_free_t* release, void* pointer);
