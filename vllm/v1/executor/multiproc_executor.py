# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the executor of several worker processes gets besides upstream's."""

from functools import cached_property

from vllm.v1.executor.answers import Answers


class MultiprocExecutor:
    @cached_property
    def _answers(self) -> Answers:
        return Answers()
