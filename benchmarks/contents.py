# SPDX-License-Identifier: Apache-2.0
"""Sums of everything that a loaded model holds on its device, computed there.

vLLM's own checksums cover parameters alone, and go through the host. MoE methods keep
what they have converted as plain attributes, such as the wrapped tensors of
triton_kernels, so attributes are followed here. On a simulated card, where kernels do
nothing, sums are of copies on the host, and `fill` writes something to sum.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator
from typing import Any

CHUNK = 1 << 26
"""Words that are summed at a time."""

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


def word_sum(tensor: Any, on_host: bool = False) -> int:
    """Of the tensor's bytes as words of eight, each times an odd factor of its
    position, modulo 2**64."""
    import torch

    tensor = tensor.detach()
    data = (tensor.cpu() if on_host else tensor).contiguous()
    data = data.reshape(-1).view(torch.uint8)
    if data.data_ptr() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    tail = data[whole:].tolist()
    total = int.from_bytes(bytes(tail), "little") * (whole // 4 + 1)
    words = data[:whole].view(torch.int64)
    for start in range(0, words.numel(), CHUNK):
        part = words[start : start + CHUNK]
        factor = torch.arange(start, start + part.numel(), device=part.device)
        total += int((factor.mul_(2).add_(1)).mul_(part).sum())
    return total % 2**64


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


def sums(worker: Any, on_host: bool = False) -> dict[str, int]:
    """Of what the worker's model holds, by path; for `collective_rpc`."""
    found = tensors(worker.model_runner.model)
    return {name: word_sum(tensor, on_host) for name, tensor in found}


def digest(found: dict[str, int]) -> str:
    """Of all sums, the same in another process that has loaded the same weights."""
    return hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()[:16]
