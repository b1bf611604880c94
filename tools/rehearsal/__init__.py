# SPDX-License-Identifier: Apache-2.0
"""Rehearse a load on a simulated card: real code, no GPU."""
