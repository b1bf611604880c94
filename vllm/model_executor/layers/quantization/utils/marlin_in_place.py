# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Marlin repacks of expert weights in the storage of the layer's parameter."""

import functools
from collections.abc import Callable, Sequence

import torch

from vllm.model_executor.layers.quantization.utils.weight_permutation import (
    outside_pools,
    use_triton,
)
from vllm.utils.torch_utils import PIN_MEMORY

# How large a part of a tensor scratch is: at most 2 % of a layer, or one expert.
WEIGHT_PARTS, SCALE_PARTS = 40, 4
SCAN_PARTS = 16  # of unusual scales, one is looked at at a time


def is_layers_own(weight: torch.Tensor) -> bool:
    """Whether the weight may be overwritten: a contiguous parameter belongs to its
    layer, which is about to replace it."""
    return isinstance(weight, torch.nn.Parameter) and weight.is_contiguous()


def repack_experts(
    weight: torch.Tensor, repack: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Repack every expert and stack the results.

    The storage of the layer's own weight takes the results when they have its size. A
    plain tensor is left intact.

    Args:
        weight: [experts, rows, columns].
        repack: from one expert to its Marlin tensor, in new memory.

    Returns:
        [experts, *shape of a repacked expert].

    """
    first = repack(weight[0])
    experts, data = weight.shape[0], weight.data
    expert_bytes = data[0].numel() * data.element_size()
    fits = first.numel() * first.element_size() == expert_bytes
    if is_layers_own(weight) and fits:
        out = data.view(experts, -1).view(first.dtype).view(experts, *first.shape)
    else:
        out = first.new_empty((experts, *first.shape))
    # Further experts reuse the memory that the first one's steps have freed.
    out[0].copy_(first)
    del first
    for expert in range(1, experts):
        out[expert].copy_(repack(data[expert]))
    return out


def writable(weight: torch.Tensor) -> torch.Tensor:
    """The bytes of a weight where they may be converted in place: uint8 [experts, rows,
    bytes], the layer's own or a copy."""
    data = weight.data.view(torch.uint8)
    if is_layers_own(weight):
        return data
    return data.clone(memory_format=torch.contiguous_format)


def repack_by_triton(
    weight: torch.Tensor, size_n: int, size_k: int, bits: int
) -> torch.Tensor | None:
    """Marlin's weights int32 [experts, size_k / 16, size_n * bits / 2] of packed bytes
    [experts, size_n, size_k * bits / 8], or None where Marlin's own kernel has to do
    it, or to refuse it."""
    shape = (size_n, size_k * bits // 8)
    fits = weight.dim() == 3 and size_n % 64 == 0 and size_k % 16 == 0
    if not fits or weight.element_size() != 1 or tuple(weight.shape[1:]) != shape:
        return None
    if not weight.shape[0] or not use_triton(weight) or weight.data_ptr() % 4:
        return None
    from vllm.model_executor.layers.quantization.utils import marlin_in_place_triton

    slots = max(1, weight.shape[0] // WEIGHT_PARTS)
    return marlin_in_place_triton.repack(writable(weight), bits, slots)


def repack_fp8_experts(weight: torch.Tensor) -> torch.Tensor:
    """`repack_experts` of FP8 weights [experts, output size, input size]."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp8 import (
        pack_fp8_to_int32,
    )

    size_n, size_k = weight.shape[1:]
    result = repack_by_triton(weight, size_n, size_k, bits=8)
    if result is not None:
        return result

    def repack(expert: torch.Tensor) -> torch.Tensor:
        words = pack_fp8_to_int32(expert, size_k_first=False)
        return ops.gptq_marlin_repack(
            b_q_weight=words.T.contiguous(), size_k=size_k, size_n=size_n, num_bits=8
        )

    return repack_experts(weight, repack)


def permute_scales_of_experts(
    scales: torch.Tensor, size_k: int, size_n: int, group_size: int
) -> torch.Tensor:
    """A copy of scales [experts, groups, size_n] in Marlin's order, the same for all
    groups; the sizes are those of `marlin_permute_scales`."""
    order = _scale_order(scales.shape[2], size_k, size_n, group_size, scales.device)
    return scales.index_select(2, order)


@functools.cache
def _scale_order(
    outputs: int, size_k: int, size_n: int, group_size: int, device: torch.device
) -> torch.Tensor:
    from vllm.model_executor.layers.quantization.utils.marlin_utils import (
        marlin_permute_scales,
    )

    numbers = torch.arange(outputs, device="cpu").view(1, -1)
    order = marlin_permute_scales(
        s=numbers, size_k=size_k, size_n=size_n, group_size=group_size
    )
    return outside_pools(lambda: order.flatten().to(device))


def by_triton(scales: torch.Tensor) -> bool:
    """Whether NVFP4 scales can be processed by Triton."""
    fp8 = scales.dtype == torch.float8_e4m3fn
    return fp8 and scales.numel() > 0 and use_triton(scales)


def recorded_event(device: torch.device) -> torch.Event:
    """An event after all that was launched so far."""
    event = torch.Event(device)
    event.record()
    return event


class ByteEnds:
    """The smallest and the largest of each tensor's bytes, as signed numbers: started
    at once on a GPU, and waited for when they are read."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        # One pass without scratch.
        found = [torch.aminmax(tensor.data.view(torch.int8)) for tensor in tensors]
        ends = torch.stack([end for pair in found for end in pair])
        pinned = PIN_MEMORY and ends.is_cuda
        self._ends = torch.empty(len(ends), dtype=torch.int8, pin_memory=pinned)
        self._ends.copy_(ends, non_blocking=True)
        self._copied = recorded_event(ends.device)

    @functools.cached_property
    def pairs(self) -> list[tuple[int, int]]:
        self._copied.synchronize()
        ends = self._ends.tolist()
        return list(zip(ends[::2], ends[1::2], strict=True))


class ScaleScan:
    """What the conversion of NVFP4 scales depends on.

    Args:
        scales: float8_e4m3fn [experts, outputs, groups].
        dtype: of the activations.
        ends: of bytes, among them those of the scales at `index`; None where Triton
            does not process them.

    """

    def __init__(
        self,
        scales: torch.Tensor,
        dtype: torch.dtype,
        ends: ByteEnds | None,
        index: int,
    ):
        self.scales, self.dtype = scales.data, dtype
        self.by_triton = ends is not None
        self._ends, self._index = ends, index

    @functools.cached_property
    def _bytes(self) -> tuple[int, bool]:
        """The largest positive number as a byte, or 0, and whether one is unusual."""
        assert self._ends is not None
        # Signed, bytes have the order of their numbers.
        low, high = self._ends.pairs[self._index]
        return (high, False) if low >= 0 and high < 127 else scan_unusual(self.scales)

    @property
    def unusual(self) -> bool:
        """Whether a scale is negative or no number."""
        return self._bytes[1]

    @functools.cached_property
    def scale_factor(self) -> float:
        """By upstream's rule, a power of two that all scales have in common."""
        if self.by_triton:
            return _factor_of_byte(self._bytes[0], self.dtype)
        return _factor(largest_scales(self.scales, self.dtype), self.dtype)


def scan_scales(dtype: torch.dtype, **scales: torch.Tensor) -> dict[str, ScaleScan]:
    """Start to look at NVFP4 scales of one layer, given by name.

    What is launched between this and the first use of a scan, no one waits for.
    """
    ends = (
        ByteEnds(list(scales.values()))
        if all(map(by_triton, scales.values()))
        else None
    )
    return {
        name: ScaleScan(tensor, dtype, ends, index)
        for index, (name, tensor) in enumerate(scales.items())
    }


def scan_unusual(scales: torch.Tensor) -> tuple[int, bool]:
    """Of any float8_e4m3fn scales: the largest positive number as a byte, or 0, and
    whether one is negative or no number."""
    found = []
    for part in scales.view(torch.uint8).chunk(SCAN_PARTS):
        bad = (part == 127) | (part > 128)
        found.append(torch.where(part < 127, part, 0).amax())
        found.append(bad.any().to(torch.uint8))
    values = torch.stack(found).tolist()
    return max(values[::2]), any(values[1::2])


def largest_scales(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Each expert's largest positive scale, or 0, as `dtype`."""
    largest = scales.new_zeros(len(scales), dtype=dtype)
    for expert, values in enumerate(scales):
        positive = values.to(dtype)
        if positive.numel():
            largest[expert] = torch.where(positive > 0, positive, 0).max()
    return largest


def _factor(scales: torch.Tensor, dtype: torch.dtype) -> float:
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
        _nvfp4_compute_scale_factor,
    )

    return _nvfp4_compute_scale_factor(scales, dtype)


@functools.cache
def _factor_of_byte(largest: int, dtype: torch.dtype) -> float:
    byte = torch.tensor([largest], dtype=torch.uint8, device="cpu")
    return _factor(byte.view(torch.float8_e4m3fn).to(dtype), dtype)


@functools.cache
def scale_table(
    dtype: torch.dtype, scale_factor: float, all_bytes: bool, device: torch.device
) -> torch.Tensor:
    """What Marlin's scale is of each byte of a float8_e4m3fn: uint8 [256].

    Args:
        dtype: of the activations.
        scale_factor: a power of two, the same for most layers of a model.
        all_bytes: also of negative scales and what is no number, about which vllm's
            function warns.
        device: where to keep it.

    """
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
        nvfp4_marlin_process_scales,
    )

    bytes_ = torch.arange(256, dtype=torch.int32, device="cpu")
    if not all_bytes:
        bytes_[(bytes_ == 127) | (bytes_ > 128)] = 0
    numbers = bytes_.to(torch.uint8).view(torch.float8_e4m3fn).view(1, 256)
    swapped, _ = nvfp4_marlin_process_scales(numbers.to(dtype), scale_factor, dtype)
    # It swaps the middle two of each four.
    table = swapped.view(torch.uint8).view(64, 4)[:, [0, 2, 1, 3]].reshape(256)
    return outside_pools(lambda: table.to(device))


def process_nvfp4_scales(
    scales: torch.Tensor,
    scan: ScaleScan,
    size_k: int,
    size_n: int,
    is_a_8bit: bool,
) -> torch.Tensor:
    """NVFP4 block scales for Marlin.

    Args:
        scales: float8_e4m3fn [experts, size_n, size_k / 16]; overwritten if it is a
            contiguous parameter.
        scan: of these scales, before zeros were added as padding.
        size_k: input size.
        size_n: output size.
        is_a_8bit: activations have eight bits.

    Returns:
        float8_e4m3fn [experts, size_k / 16, size_n].

    """
    from vllm.model_executor.layers.quantization.utils.marlin_utils import (
        marlin_permute_scales,
    )
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
        nvfp4_marlin_process_scales,
    )

    dtype, factor = scan.dtype, scan.scale_factor
    fits = tuple(scales.shape[1:]) == (size_n, size_k // 16) and size_n % 64 == 0
    fits = fits and size_k > 16 and scales.is_contiguous()
    if fits and scan.by_triton and not is_a_8bit:
        from vllm.model_executor.layers.quantization.utils import (
            marlin_in_place_triton,
        )

        table = scale_table(dtype, factor, scan.unusual, scales.device)
        slots = max(1, len(scales) // SCALE_PARTS)
        result = marlin_in_place_triton.map_scales(writable(scales), table, slots)
        return result.view(torch.float8_e4m3fn)

    def process(expert: torch.Tensor) -> torch.Tensor:
        permuted = marlin_permute_scales(
            s=expert.to(dtype).T,
            size_k=size_k,
            size_n=size_n,
            group_size=16,
            is_a_8bit=is_a_8bit,
        )
        return nvfp4_marlin_process_scales(permuted, factor, dtype)[0]

    return repack_experts(scales, process)
