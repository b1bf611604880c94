// SPDX-License-Identifier: Apache-2.0
// Physical memory of one device behind a reserved range of addresses.
#pragma once

#include "context.h"

#include <array>
#include <atomic>
#include <cstdint>

namespace cumem {

using Handle = CUmemGenericAllocationHandle;

// What a device offers, asked once.
struct DeviceTraits {
  CUmemAllocationProp prop = {};
  std::uint64_t granularity = 0;  // bytes
  // What memory can be exported as. Not part of `prop`, as it changes once.
  mutable std::atomic<CUmemAllocationHandleType> handle_types{
      CU_MEM_HANDLE_TYPE_NONE};
};

inline Status ask_device(int device, DeviceTraits* traits) {
  auto supports = [device](CUdevice_attribute attribute) {
    int value = 0;
    return driver().cuDeviceGetAttribute(&value, attribute, device) ==
               CUDA_SUCCESS &&
           value != 0;
  };
  CUmemAllocationProp& prop = traits->prop;
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  prop.allocFlags.compressionType = CU_MEM_ALLOCATION_COMP_NONE;
  if (supports(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)) {
    prop.allocFlags.gpuDirectRDMACapable = 1;
  }
  if (supports(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)) {
    traits->handle_types = CU_MEM_HANDLE_TYPE_FABRIC;
  }
  std::size_t granularity = 0;
  Status status = CUMEM_CALL(cuMemGetAllocationGranularity, &granularity, &prop,
                             CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  if (status.ok() && granularity == 0) {
    return Status::refused("the driver reports an allocation granularity of 0");
  }
  traits->granularity = granularity;
  return status;
}

// The cached traits of `device`. Call inside a DeviceScope.
inline Status device_traits(int device, const DeviceTraits** traits) {
  static std::array<std::atomic<const DeviceTraits*>, kMaxDevices> known{};
  if (device < 0 || device >= kMaxDevices) {
    return Status::refused("no device has the number " +
                           std::to_string(device));
  }
  *traits = known[device].load(std::memory_order_acquire);
  if (*traits != nullptr) return {};
  auto* asked = new DeviceTraits;
  Status status = ask_device(device, asked);
  if (!status.ok()) {
    delete asked;
    return status;
  }
  const DeviceTraits* none = nullptr;
  if (known[device].compare_exchange_strong(none, asked,
                                            std::memory_order_acq_rel)) {
    *traits = asked;
  } else {
    delete asked;
    *traits = none;
  }
  return {};
}

inline Status create_memory(const DeviceTraits& traits, std::uint64_t size,
                            Handle* handle) {
  CUmemAllocationProp prop = traits.prop;
  prop.requestedHandleTypes = traits.handle_types;
  CUresult result = driver().cuMemCreate(handle, size, &prop, 0);
  // A device can support fabric handles on a machine that has no fabric; then
  // the driver refuses them, and a file descriptor is the next best handle. It
  // is asked only once: a refused request costs a wake time on the device.
  if (prop.requestedHandleTypes == CU_MEM_HANDLE_TYPE_FABRIC &&
      (result == CUDA_ERROR_NOT_PERMITTED ||
       result == CUDA_ERROR_NOT_SUPPORTED)) {
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    traits.handle_types = prop.requestedHandleTypes;
    result = driver().cuMemCreate(handle, size, &prop, 0);
  }
  return result == CUDA_SUCCESS ? Status()
                                : Status::failed("cuMemCreate", result);
}

// Puts fresh physical memory behind [address, address + size), readable and
// writable by its device. On failure `handle` (or 0) and `mapped` say what
// there is to give back.
inline Status map_memory(const DeviceTraits& traits, CUdeviceptr address,
                         std::uint64_t size, Handle* handle, bool* mapped) {
  *mapped = false;
  Status status = create_memory(traits, size, handle);
  if (!status.ok()) {
    *handle = 0;
    return status;
  }
  status = CUMEM_CALL(cuMemMap, address, size, 0, *handle, 0);
  *mapped = status.ok();
  if (!*mapped) return status;
  CUmemAccessDesc access = {};
  access.location = traits.prop.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return CUMEM_CALL(cuMemSetAccess, address, size, &access, 1);
}

}  // namespace cumem
