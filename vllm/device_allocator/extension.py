# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CuMem extension, as far as this machine can use it.

Importing this module works everywhere. `cumem_available` says whether sleep mode's
allocator can run: the extension is part of the build, and a driver opens. Nothing here
initialises the driver, so a process may still fork afterwards.
"""

import importlib
from types import ModuleType
from typing import Any

from vllm.logger import init_logger

logger = init_logger(__name__)


def _load() -> ModuleType | None:
    try:
        cumem_allocator = importlib.import_module("vllm.cumem_allocator")
    except ImportError as error:
        logger.debug("The CuMem allocator is not available: %s", error)
        return None
    # An extension that links the driver could not have been imported without one.
    opens = getattr(cumem_allocator, "driver_available", lambda: True)
    return cumem_allocator if opens() else None


def _load_runtime() -> Any:
    from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary

    return CudaRTLibrary()


extension = _load()
cumem_available: bool = extension is not None
libcudart: Any = _load_runtime() if cumem_available else None
lib_name: str | None = getattr(extension, "__file__", None)
init_module: Any = getattr(extension, "init_module", None)
python_create_and_map: Any = getattr(extension, "python_create_and_map", None)
python_unmap_and_release: Any = getattr(extension, "python_unmap_and_release", None)
