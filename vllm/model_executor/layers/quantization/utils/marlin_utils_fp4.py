# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Marlin repack of FP4 experts, in place for a layer's own parameter."""

import torch

import vllm._custom_ops as ops
from vllm.model_executor.layers.quantization.utils.marlin_in_place import (
    repack_by_triton,
    repack_experts,
)


def _repack_marlin_experts(
    weight: torch.Tensor,
    size_n: int,
    size_k: int,
    is_a_8bit: bool,
) -> torch.Tensor:
    """Repack FP4 experts for Marlin.

    Args:
        weight: packed FP4 bytes [experts, size_n, size_k / 2]; overwritten if it is a
            contiguous parameter.
        size_n: output size of each expert.
        size_k: input size of each expert.
        is_a_8bit: activations have eight bits.

    Returns:
        int32 [experts, size_k / 16, 2 * size_n].

    """
    result = None if is_a_8bit else repack_by_triton(weight, size_n, size_k, bits=4)
    if result is not None:
        return result

    def repack(expert: torch.Tensor) -> torch.Tensor:
        words = expert.view(torch.int32).T.contiguous()
        return ops.gptq_marlin_repack(
            b_q_weight=words,
            size_k=size_k,
            size_n=size_n,
            num_bits=4,
            is_a_8bit=is_a_8bit,
        )

    return repack_experts(weight, repack)
