// SPDX-License-Identifier: Apache-2.0
// Device code that never runs: its variables, and what kernels claim to need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace rehearsal {

// Device memory that no card is charged for: the code of a module and its
// variables are part of the calibration constants.
struct ModuleVariable {
  uintptr_t address;
  size_t size;
};

void register_variable(const void* host_symbol, size_t size);
ModuleVariable variable_of(const void* host_symbol);
ModuleVariable variable_by_name(const std::string& name);

// A fat binary, as nvcc's generated code registers it: the handle that its
// functions name. `wrapper` is the structure of fatbinary_section.h.
void** register_module(const void* wrapper);
void register_function(void** module, const void* host_symbol);

// The architecture, as 90, of the code that the driver would load for a
// registered function. Libraries choose among their kernels by it. That of
// the card when nothing is known of the function.
int code_version(const void* host_symbol);

// CUfunction_attribute.
int kernel_attribute(int attribute);

void device_uuid(int device, char bytes[16]);

}  // namespace rehearsal
