# SPDX-License-Identifier: Apache-2.0
"""Pages of the documentation that are made and not written."""
