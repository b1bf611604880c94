# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import pytest
import torch

from vllm.device_allocator import alloc_conf
from vllm.device_allocator.alloc_conf import bounded_splits, conf_has


@pytest.fixture
def written(monkeypatch):
    """The config strings that were written, the live one last."""
    history = [""]
    monkeypatch.setattr(alloc_conf, "current_alloc_conf", lambda: history[-1])
    monkeypatch.setattr(alloc_conf, "set_alloc_conf", history.append)
    return history


@pytest.mark.parametrize("conf", ["", "garbage_collection_threshold:0.8"])
def test_limit_is_added_to_the_other_options_and_taken_back(written, conf):
    written.append(conf)
    with bounded_splits(20):
        *kept, added = written[-1].split(",")
        assert ",".join(kept) == conf
        assert added == "max_split_size_mb:20"
    assert written[-1] == conf


def test_limit_of_the_user_stays(written):
    written.append("max_split_size_mb:512,roundup_power2_divisions:4")
    with bounded_splits(20):
        pass
    assert len(written) == 2


def test_error_in_the_body_restores_too(written):
    with pytest.raises(RuntimeError), bounded_splits(20):
        raise RuntimeError
    assert written[-1] == ""


def test_other_allocator_backends_have_no_such_option(written, monkeypatch):
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "async")
    with bounded_splits(20):
        assert written == [""]


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ("", False),
        ("max_split_size_mb:20", True),
        ("expandable_segments:True, max_split_size_mb : 64", True),
        ("max_non_split_rounding_mb:32", False),
    ],
)
def test_conf_has(conf, expected):
    assert conf_has(conf, "max_split_size_mb") is expected
