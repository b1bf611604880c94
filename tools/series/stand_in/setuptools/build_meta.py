# SPDX-License-Identifier: Apache-2.0
"""The two hooks of PEP 517 that ``pip download`` calls. Nothing can be built."""

from email import message_from_bytes
from pathlib import Path


def get_requires_for_build_wheel(config_settings: object = None) -> list[str]:
    return []


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: object = None
) -> str:
    told = message_from_bytes(Path("PKG-INFO").read_bytes())
    folder = Path(metadata_directory, f"{told['Name']}-{told['Version']}.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_bytes(told.as_bytes())
    return folder.name
