# SPDX-License-Identifier: Apache-2.0
"""The one exception by which the engine says no."""

from __future__ import annotations


class Refusal(Exception):
    """The series cannot be applied, and nothing was changed.

    Layers that know only a syntax tree raise it with an ``anchor``; the layers above
    add the file and the patch, so that the message names all three.
    """

    def __init__(
        self,
        reason: str,
        *,
        patch: str | None = None,
        file: str | None = None,
        anchor: str | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.patch = patch
        self.file = file
        self.anchor = anchor

    def at(self, *, patch: str | None = None, file: str | None = None) -> Refusal:
        """The same refusal, with the places filled in that it did not know."""
        return Refusal(
            self.reason,
            patch=self.patch or patch,
            file=self.file or file,
            anchor=self.anchor,
        )

    def __str__(self) -> str:
        places = (self.patch, self.file, self.anchor)
        return ": ".join([place for place in places if place] + [self.reason])
