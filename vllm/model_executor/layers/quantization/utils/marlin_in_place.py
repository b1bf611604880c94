# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Marlin repacks of expert weights in the storage of the layer's parameter."""

from collections.abc import Callable

import torch


def repack_experts(
    weight: torch.Tensor, repack: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Repack every expert and stack the results.

    A parameter that is contiguous belongs to its layer, which is about to replace it:
    its storage takes the results when they have its size. A plain tensor is left
    intact.

    Args:
        weight: [experts, rows, columns].
        repack: from one expert to its Marlin tensor, in new memory.

    Returns:
        [experts, *shape of a repacked expert].

    """
    first = repack(weight[0])
    experts, data = weight.shape[0], weight.data
    expert_bytes = data[0].numel() * data.element_size()
    if (
        isinstance(weight, torch.nn.Parameter)
        and weight.is_contiguous()
        and first.numel() * first.element_size() == expert_bytes
    ):
        out = data.view(experts, -1).view(first.dtype).view(experts, *first.shape)
    else:
        out = first.new_empty((experts, *first.shape))
    # Further experts reuse the memory that the first one's steps have freed.
    out[0].copy_(first)
    del first
    for expert in range(1, experts):
        out[expert].copy_(repack(data[expert]))
    return out


def repack_fp8_experts(weight: torch.Tensor) -> torch.Tensor:
    """`repack_experts` of FP8 weights [experts, output size, input size]."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp8 import (
        pack_fp8_to_int32,
    )

    size_n, size_k = weight.shape[1:]

    def repack(expert: torch.Tensor) -> torch.Tensor:
        words = pack_fp8_to_int32(expert, size_k_first=False)
        return ops.gptq_marlin_repack(
            b_q_weight=words.T.contiguous(), size_k=size_k, size_n=size_n, num_bits=8
        )

    return repack_experts(weight, repack)


def largest_scales(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Each expert's largest positive scale, or 0: [experts], as `dtype`.

    They have the scale factor of all scales, which `_nvfp4_compute_scale_factor`
    takes from the largest.
    """
    largest = scales.new_zeros(len(scales), dtype=dtype)
    for expert, values in enumerate(scales.data):
        positive = values.to(dtype)
        if positive.numel():
            largest[expert] = torch.where(positive > 0, positive, 0).max()
    return largest


def process_nvfp4_scales(
    scales: torch.Tensor,
    dtype: torch.dtype,
    scale_factor: float,
    size_k: int,
    size_n: int,
    is_a_8bit: bool,
) -> torch.Tensor:
    """NVFP4 block scales for Marlin, by `repack_experts`.

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
