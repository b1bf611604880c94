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

// CUfunction_attribute.
int kernel_attribute(int attribute);

void device_uuid(int device, char bytes[16]);

}  // namespace rehearsal
