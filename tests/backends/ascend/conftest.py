"""The software device: torch_npu in an environment of its own over stand-ins for CANN."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.backends.ascend.softcann.environment import Unavailable, create, why_not

FOLDER_VARIABLE = "SOFTCANN_FOLDER"
"""Names a folder to keep the environment in from one test session to the next."""


@pytest.fixture(scope="session")
def softcann_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the environment; the test is skipped where torch_npu cannot be installed."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    kept = os.environ.get(FOLDER_VARIABLE)
    folder = Path(kept) if kept else tmp_path_factory.mktemp("softcann")
    try:
        create(folder)
    except Unavailable as error:
        pytest.skip(f"the package index does not give torch_npu: {error}")
    return folder
