# SPDX-License-Identifier: Apache-2.0
"""Digests of everything that a loaded model holds on its device, computed there.

vLLM's own checksums cover parameters alone, and go through the host. MoE methods keep
what they have converted as plain attributes, such as the wrapped tensors of
triton_kernels, so attributes are followed here. On a simulated card, where kernels do
nothing, digests are of copies on the host, and `make` writes something to digest.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator
from typing import Any

from small_card import simulated_card

FOLLOWED = ("vllm.model_executor", "triton_kernels", "vllm.third_party")
"""Modules whose objects are followed, beside containers and layers."""

FILLED = 1 << 18
"""Bytes of each tensor that `fill` writes."""

NOT_OF_THE_MODEL = ("kv_cache",)
"""Attributes that other memory is reached by."""


def tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """Each tensor once that the model reaches outside the host, by its path of
    attributes."""
    import torch

    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        name, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.device.type != "meta" and value.numel():
                yield name, value
        elif isinstance(value, dict):
            waiting += [(f"{name}.{key}", inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(f"{name}.{key}", inner) for key, inner in enumerate(value)]
        elif isinstance(value, torch.nn.Module) or _is_followed(value):
            waiting += [
                (f"{name}.{key}", inner)
                for key, inner in getattr(value, "__dict__", {}).items()
                if key not in NOT_OF_THE_MODEL
            ]


def _is_followed(value: Any) -> bool:
    return type(value).__module__.startswith(FOLLOWED)


def tensor_digest(tensor: Any) -> str:
    """128 bits of the bytes of a tensor, computed where it lies.

    Two sums, modulo 2**64, of the words times odd factors that depend on the
    position: hashing a GiB on the host would take longer than all conversions.
    """
    import torch

    plain = tensor.detach().contiguous()
    data = plain.reshape(-1).view(torch.uint8)
    if data.data_ptr() % 8:
        data = data.clone()
    tail = -data.numel() % 8
    whole = data[: data.numel() - data.numel() % 8]
    if tail:
        rest = torch.cat((data[whole.numel() :], data.new_zeros(tail)))
    else:
        rest = data[:0]
    sums = [0, 0]
    position = 0
    for part in (*whole.view(torch.int64).split(1 << 22), rest.view(torch.int64)):
        index = torch.arange(position, position + len(part), device=part.device)
        position += len(part)
        for i, factor in enumerate((-0x61C8864680B583EB, 0x2545F4914F6CDD1D)):
            weight = (index + 1) * factor
            weight = (weight ^ ((weight >> 29) & 0x7FFFFFFFF)) * (factor | 5)
            sums[i] += int(((part ^ weight) * (weight | 1)).sum())
    return "".join(f"{value % 2**64:016x}" for value in (*sums, data.numel()))


def fill(worker: Any) -> None:
    """Write made bytes to the beginning of all that the worker's model holds."""
    import torch

    for name, tensor in tensors(worker.model_runner.model):
        if not tensor.is_contiguous():
            continue
        data = tensor.detach().view(-1).view(torch.uint8)[:FILLED]
        seed = zlib.crc32(f"{worker.rank}{name}".encode())
        made = torch.Generator().manual_seed(seed)
        data.copy_(torch.randint(256, data.shape, generator=made, dtype=torch.uint8))


def make(worker: Any) -> None:
    """`fill`, where no kernel has made any contents."""
    if simulated_card():
        fill(worker)


def digests(worker: Any) -> dict[str, str]:
    """Of what the worker's model holds, by path; for `collective_rpc`."""
    found = dict(tensors(worker.model_runner.model))
    if simulated_card():
        found = {name: tensor.cpu() for name, tensor in found.items()}
    return {name: tensor_digest(tensor) for name, tensor in found.items()}


def digest(found: dict[str, str]) -> str:
    """Of all digests, the same in another process that has loaded the same weights."""
    return hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()[:16]
