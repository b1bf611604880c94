# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks compare over sleep and wake is all that a model holds."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import contents  # noqa: E402


class Wrapped:
    """As triton_kernels wraps what MoE methods have converted."""

    __module__ = "triton_kernels.tensor"

    def __init__(self, **parts):
        self.__dict__ = parts


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0))
        self.register_buffer("scale", torch.ones(3))
        data = torch.arange(40, dtype=torch.uint8)
        self.experts = Wrapped(storage=Wrapped(data=data))
        self.options = {"bias": [torch.zeros(2)]}
        self.kv_cache = torch.zeros(100)


def worker(layer):
    return SimpleNamespace(rank=0, model_runner=SimpleNamespace(model=layer))


def test_plain_attributes_are_followed_and_caches_are_not():
    found = dict(contents.tensors(torch.nn.Sequential(Layer())))
    ends = {name.rsplit(".", 2)[-1] for name in found}
    assert ends == {"weight", "scale", "data", "0"}
    assert len(found) == 4


def test_each_tensor_counts_once():
    layer = Layer()
    layer.again = layer.experts
    assert len(dict(contents.tensors(layer))) == 4


@pytest.mark.parametrize(
    "change", ["byte", "swapped words", "swapped bytes at the end"]
)
def test_a_change_changes_the_digest(change):
    data = torch.randint(0, 256, (8 * 9 + 3,), dtype=torch.uint8)
    data[:16] = torch.arange(16)
    data[-2:] = torch.tensor([1, 2])
    before = contents.tensor_digest(data)
    if change == "byte":
        data[20] ^= 1
    elif change == "swapped words":
        data[:16] = data[:16].roll(8)
    else:
        data[-2:] = data[-2:].flip(0)
    assert contents.tensor_digest(data) != before


def test_tensors_at_odd_addresses_and_strided_ones():
    base = torch.randint(0, 256, (6, 8), dtype=torch.uint8)
    assert contents.tensor_digest(base.view(-1)[3:]) == contents.tensor_digest(
        base.view(-1)[3:].clone()
    )
    assert contents.tensor_digest(base.T) == contents.tensor_digest(base.T.contiguous())


def test_made_contents_depend_on_name_and_rank():
    layers = [Layer(), Layer(), Layer()]
    for rank, layer in zip((0, 0, 1), layers, strict=True):
        one = worker(layer)
        one.rank = rank
        contents.fill(one)
    first, same, other = (contents.digests(worker(layer)) for layer in layers)
    assert first == same
    assert all(first[name] != other[name] for name in first)
    assert contents.digest(first) != contents.digest(other)
