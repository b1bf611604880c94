# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a worker answers about sleep mode: beside upstream's definitions."""

from vllm.device_allocator import worker_memory


class Worker:
    def take_sleep_mode_moves(self) -> dict[str, dict[str, float]]:
        """Bytes and seconds of sleep mode's operations since the last time."""
        return worker_memory.take_moves()
