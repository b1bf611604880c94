# SPDX-License-Identifier: Apache-2.0
"""What stands in for compiled kernels."""

import pytest

from tools.rehearsal.jit import Launched


def test_a_kernel_can_be_launched_again():
    launched = Launched()
    assert launched[(3, 1, 1)]("tensor", 7) == 0


def test_a_kernel_is_no_sequence():
    with pytest.raises(TypeError):
        iter(Launched())
