# SPDX-License-Identifier: Apache-2.0
"""The repository's own tools; none of them is part of the fork's wheel."""
