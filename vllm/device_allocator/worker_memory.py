# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a worker asks of sleep mode's allocator, whether or not it is in use."""

from vllm.device_allocator.cumem import CuMemAllocator


def mapped_bytes() -> int | None:
    """Bytes of device memory behind sleep mode's segments; None if it is not in use."""
    allocator = CuMemAllocator.instance
    return None if allocator is None else allocator.mapped_bytes


def freed_bytes(device_wide: int, mapped_before: int | None) -> int:
    """Bytes that a sleep has freed.

    Other processes change the free memory of the device meanwhile, so this process's
    own segments are counted where they are known.

    Args:
        device_wide: the change of the device's free memory.
        mapped_before: `mapped_bytes` before the sleep.

    """
    now = mapped_bytes()
    if mapped_before is None or now is None:
        return device_wide
    return mapped_before - now


def take_moves() -> dict[str, dict[str, float]]:
    """What sleep mode moved since the last time; empty if it is not in use."""
    allocator = CuMemAllocator.instance
    return {} if allocator is None else allocator.take_moves()


def prepare_sleep() -> None:
    """After a load: make host memory in the background, if that is wanted."""
    if CuMemAllocator.instance is not None:
        CuMemAllocator.instance.prepare_sleep()


def release_host_memory() -> None:
    """At the end of a worker, whose process may go on: unlock what is kept."""
    if CuMemAllocator.instance is not None:
        CuMemAllocator.instance.release_host_memory()
