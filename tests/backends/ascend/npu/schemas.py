"""The schemas of torch_npu's operators that the backend calls; ``schemas.json`` holds them.

``python -m tests.backends.ascend.npu.schemas``, run where torch_npu is, writes the file again.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

from fp8core_backends.ascend import operators
from fp8core_backends.ascend.operators import library

__all__ = ["FILE", "schemas"]

FILE = Path(__file__).with_name("schemas.json")


def called() -> list[str]:
    """The names of the operators that the package ``operators`` calls."""
    files = sorted(Path(operators.__path__[0]).glob("*.py"))
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    return sorted(set(re.findall(r"(?:npu|load\(\))\.(npu_\w+)\(", source)))


def schemas() -> dict[str, str]:
    """The schema of each operator in the torch_npu that is installed."""
    library.load()
    return {name: str(getattr(torch.ops.npu, name).default._schema) for name in called()}


if __name__ == "__main__":
    FILE.write_text(json.dumps(schemas(), indent=1) + "\n", encoding="utf-8")
