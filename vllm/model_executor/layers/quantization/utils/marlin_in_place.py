# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Marlin repacks of expert weights in the storage of the layer's parameter."""

import functools
from collections.abc import Callable

import torch

from vllm.model_executor.layers.quantization.utils.weight_permutation import use_triton
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
    scales: torch.Tensor, permute: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """A permuted copy of scales [experts, groups, outputs].

    Args:
        scales: [experts, groups, outputs].
        permute: what permutes the outputs of [groups, outputs], whatever the groups.

    """
    numbers = torch.arange(scales.shape[2], device="cpu")
    order = permute(numbers.view(1, -1)).flatten()
    if scales.is_cuda and PIN_MEMORY:
        # A copy of other memory would wait for the weights to be repacked.
        order = order.pin_memory()
    return scales.index_select(2, order.to(scales.device, non_blocking=True))


def scales_by_triton(scales: torch.Tensor, size_k: int, size_n: int) -> bool:
    """Whether NVFP4 scales [experts, size_n, size_k / 16] are processed by Triton."""
    if tuple(scales.shape[1:]) != (size_n, size_k // 16) or not scales.numel():
        return False
    fits = size_n % 64 == 0 and size_k > 16 and scales.is_contiguous()
    return fits and scales.dtype == torch.float8_e4m3fn and use_triton(scales)


def scan_scales(scales: torch.Tensor) -> tuple[int, bool]:
    """Of float8_e4m3fn scales: the largest positive number as a byte, or 0, and whether
    one is negative or no number."""
    # One pass without scratch settles the usual case, that none is.
    ends = torch.aminmax(scales.data.view(torch.int8))
    low, high = torch.stack(ends).tolist()
    if low >= 0 and high < 127:
        return high, False
    found = []
    for part in scales.data.view(torch.uint8).chunk(SCAN_PARTS):
        bad = (part == 127) | (part > 128)
        found.append(torch.where(part < 127, part, 0).amax())
        found.append(bad.any().to(torch.uint8))
    values = torch.stack(found).tolist()
    return max(values[::2]), any(values[1::2])


def largest_scales(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Each expert's largest positive scale, or 0, or the largest of all experts, as
    `dtype`.

    They have the scale factor of all scales, which `_nvfp4_compute_scale_factor`
    takes from the largest.
    """
    rows, groups = scales.shape[1:]
    if scales_by_triton(scales, 16 * groups, rows):
        byte, _ = scan_scales(scales)
        number = torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn)
        return number.to(dtype)
    largest = scales.new_zeros(len(scales), dtype=dtype)
    for expert, values in enumerate(scales.data):
        positive = values.to(dtype)
        if positive.numel():
            largest[expert] = torch.where(positive > 0, positive, 0).max()
    return largest


@functools.cache
def scale_table(
    dtype: torch.dtype, scale_factor: float, all_bytes: bool
) -> torch.Tensor:
    """What Marlin's scale is of each byte of a float8_e4m3fn: uint8 [256], on the CPU.

    Args:
        dtype: of the activations.
        scale_factor: a power of two, the same for most layers of a model.
        all_bytes: also of negative scales and what is no number, about which vllm's
            function warns.

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
    return swapped.view(torch.uint8).view(64, 4)[:, [0, 2, 1, 3]].reshape(256)


def process_nvfp4_scales(
    scales: torch.Tensor,
    dtype: torch.dtype,
    scale_factor: float,
    size_k: int,
    size_n: int,
    is_a_8bit: bool,
) -> torch.Tensor:
    """NVFP4 block scales for Marlin.

    Args:
        scales: float8_e4m3fn [experts, size_n, size_k / 16]; overwritten if it is a
            contiguous parameter.
        dtype: of the activations.
        scale_factor: common to all experts.
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

    if not is_a_8bit and scales_by_triton(scales, size_k, size_n):
        from vllm.model_executor.layers.quantization.utils import (
            marlin_in_place_triton,
        )

        _, bad = scan_scales(scales)
        table = scale_table(dtype, scale_factor, bad).to(scales.device)
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
        return nvfp4_marlin_process_scales(permuted, scale_factor, dtype)[0]

    return repack_experts(scales, process)
