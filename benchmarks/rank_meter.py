# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a worker of ranks.py measures of itself; imported in each worker process."""

import functools
from typing import Any

import contents
import torch
from engine_load import Meter
from small_card import GIB, leave_free

from vllm.v1.worker.gpu_worker import Worker


class RankMeter:
    """A worker extension: methods for `collective_rpc`."""

    rank: int

    def sleepload_figures(self) -> dict[str, float]:
        return self._sleepload_figures

    def sleepload_used(self) -> float:
        return self._sleepload_meter.used()

    def sleepload_make_contents(self) -> None:
        contents.make(self)

    def sleepload_digests(self) -> dict[str, str]:
        return contents.digests(self)

    def sleepload_take(self, rank: int, card: float) -> None:
        """Leave this many GiB free on one rank's GPU."""
        if self.rank == rank:
            self._sleepload_ballast = leave_free(card)

    def sleepload_give(self, rank: int) -> None:
        """Give back what was taken."""
        if self.rank == rank:
            self._sleepload_ballast.free()


def _measure_load(load: Any) -> Any:
    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        meter = self._sleepload_meter = Meter()
        load(self, *args, **kwargs)
        torch.cuda.synchronize()
        self._sleepload_figures = {"load_peak": meter.peak, "after_load": meter.used()}

    return load_model


def _measure_kv_cache(available: Any) -> Any:
    @functools.wraps(available)
    def determine_available_memory(self: Any) -> int:
        size = available(self)
        self._sleepload_figures["kv_cache"] = round(size / GIB, 3)
        return size

    return determine_available_memory


# An extension cannot override a worker's methods, so they are wrapped where they are.
Worker.load_model = _measure_load(Worker.load_model)
Worker.determine_available_memory = _measure_kv_cache(Worker.determine_available_memory)
