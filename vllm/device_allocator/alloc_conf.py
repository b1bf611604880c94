# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The allocator's split limit inside a pool: what is added to upstream's module."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import torch

MAX_SPLIT_SIZE = "max_split_size_mb"


def conf_has(conf: str, key: str) -> bool:
    """Whether an allocator config string sets ``key``."""
    return any(field.partition(":")[0].strip() == key for field in conf.split(","))


@contextmanager
def non_expandable_allocations() -> Generator[None, None, None]:
    """Run the body without expandable segments: upstream has it since 0.33."""
    conf = current_alloc_conf()
    with ExitStack() as undo:
        if conf_flag_enabled(conf, EXPANDABLE_SEGMENTS):
            undo.callback(set_alloc_conf, conf)
            set_alloc_conf(with_conf_flag(conf, EXPANDABLE_SEGMENTS, False))
        yield


@contextmanager
def bounded_splits(limit_mb: int) -> Generator[None, None, None]:
    """Run the body with a limit on splits, unless the user has set one.

    Args:
        limit_mb: free blocks of this many MiB and more are not split.

    """
    conf = current_alloc_conf()
    if torch.cuda.memory.get_allocator_backend() != "native" or conf_has(
        conf, MAX_SPLIT_SIZE
    ):
        yield
        return
    set_alloc_conf(",".join(filter(None, [conf, f"{MAX_SPLIT_SIZE}:{limit_mb}"])))
    try:
        yield
    finally:
        set_alloc_conf(conf)
