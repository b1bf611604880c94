# SPDX-License-Identifier: Apache-2.0
"""Peak memory of conversions, by PyTorch's real allocator on a simulated card."""

import pytest

from tools.rehearsal import testing

#: 128 experts, except where a layer is too small to matter.
CASES = {
    "bf16_trtllm": dict(hidden=4096, intermediate=384),
    "nvfp4": dict(hidden=4096, intermediate=768),
    "nvfp4 for CUTLASS": dict(
        format="nvfp4", backend="FLASHINFER_CUTLASS", hidden=2048, intermediate=768
    ),
    "reorder_w1w3": dict(hidden=4096, intermediate=768),
    "fp8_tensor": dict(hidden=4096, intermediate=768),
    "fp8_block": dict(hidden=4096, intermediate=768),
    "mxfp8": dict(hidden=4096, intermediate=768),
    "mxfp4_swizzle": dict(hidden=3072, intermediate=3072),
    # Tensors that grow, in the storage that they were created with.
    "nvfp4, padded": dict(format="nvfp4", hidden=2688, intermediate=928, gated=False),
    "nvfp4 for CUTLASS, padded": dict(
        format="nvfp4",
        backend="FLASHINFER_CUTLASS",
        hidden=2688,
        intermediate=928,
        gated=False,
    ),
    "fp8_tensor, padded": dict(
        format="fp8_tensor", hidden=2688, intermediate=1856, gated=False
    ),
    "mxfp8, padded": dict(format="mxfp8", hidden=2816, intermediate=704),
    "mxfp4_swizzle, padded scales": dict(
        format="mxfp4_swizzle", hidden=2880, intermediate=2880
    ),
    "mxfp4_swizzle, padded": dict(
        format="mxfp4_swizzle", hidden=2880, intermediate=1440
    ),
    "marlin_nvfp4": dict(hidden=4096, intermediate=768),
}
PROGRAM = """
import torch
from tests.kernels.moe import conversion_cases

conversion_cases.use_stand_ins()

def storages(values):
    found = {}
    for value in values:
        value = value.storage.data if hasattr(value, "shape_max") else value
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())

def peak(case):
    before = torch.cuda.memory_allocated()
    inputs = conversion_cases.Inputs(case, "cuda")
    build, run = conversion_cases.FORMATS[case["format"]]
    build(inputs)
    source = storages(inputs.layer.parameters())
    torch.cuda.reset_peak_memory_stats()
    results = run(inputs)
    highest = torch.cuda.max_memory_allocated() - before
    return source, storages([*inputs.layer.parameters(), *results]), highest

answers = {}
for name, case in CASES.items():
    peak(case)  # index tables are made once
    answers[name] = peak(case)
answer(**answers)
"""


@pytest.fixture(scope="module")
def peaks():
    cases = {}
    for name, case in CASES.items():
        cases[name] = dict(format=name, experts=128, gated=True) | case
    program = f"CASES = {cases!r}\n{PROGRAM}"
    return testing.on_card(program, memory="140GiB", capability="9.0").check().answer


@pytest.mark.parametrize("name", CASES)
def test_conversions_hold_little_more_than_the_layer(peaks, name):
    source, result, peak = peaks[name]
    assert result - source < 4096  # activation scales, one for each expert
    assert peak - source <= max(source // 128, source // 50)
