# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Parameters whose storage has room for the size that they will be padded to.

A weight that grows in its conversion needs its source and its result at once, unless
its storage was large enough from the beginning. `reserve` gives a parameter such a
storage. Shape, strides, dtype and attributes stay; the conversion that pads it finds
the room with `has_room`. Only storages made here are used so, since what lies behind a
tensor in any other storage may belong to another one.
"""

import weakref
from math import prod

import torch

# The bytes at the front that are the parameter's.
_reserved: "weakref.WeakKeyDictionary[torch.UntypedStorage, int]" = (
    weakref.WeakKeyDictionary()
)


def reserve(parameter: torch.nn.Parameter, size: int) -> None:
    """Move `parameter`, with its values, to the front of a new storage of `size` bytes,
    if that is more than it has."""
    data = parameter.data
    needed = data.numel() * data.element_size()
    if size <= needed or data.is_meta or not data.is_contiguous():
        return
    memory = torch.empty(size, dtype=torch.uint8, device=data.device)
    moved = memory[:needed].view(data.dtype).view(data.shape)
    moved.copy_(data)
    parameter.data = moved
    _reserved[memory.untyped_storage()] = needed


def has_room(weight: torch.Tensor, size: int) -> bool:
    """Whether the weight is alone at the front of a storage with room for `size` bytes:
    a part of a parameter has no room, nor has one that was padded."""
    storage = weight.data.untyped_storage()
    used = weight.numel() * weight.element_size()
    if _reserved.get(storage) != used or storage.nbytes() < size:
        return False
    return not weight.storage_offset() and weight.is_contiguous()


def room_for(data: torch.Tensor, *shape: int) -> torch.Tensor:
    """The front of the storage of a weight that has room, contiguous of this shape;
    `data` is the weight as bytes."""
    strides = [prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    return data.as_strided(shape, strides, 0)
