// SPDX-License-Identifier: Apache-2.0
// Primary contexts and which of them is current on a thread. One per card;
// the runtime's current device and the driver's current context are the same.
#pragma once

#include "memory.h"

namespace rehearsal {

// cuInit, or the runtime's first call.
void initialize();
bool is_initialized();

void* primary_context(int device);
// -1: not a context.
int context_device(void* context);

// Of this thread; null before anything made one current.
void* current_context();
void set_current_context(void* context);
void push_context(void* context);
Result pop_context(void** context);

// The runtime's device on this thread, 0 at first.
int current_device();
Result set_current_device(int device);
// Initializes, opens the current device's context, makes it current.
Result ensure_context();

}  // namespace rehearsal
