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
