"""fp8core's command line on the software device: ``python -m tests.backends.ascend.softcann ARGS``.

Run by the Python of the environment that ``environment.py`` creates, with its variables.
"""

from __future__ import annotations

import importlib
import sys

from tests.backends.ascend.softcann import device

if __name__ == "__main__":
    importlib.import_module("tests.backends.ascend.softcann.formulas")  # registers them
    device.install()
    sys.exit(importlib.import_module("fp8core.__main__").main(tuple(sys.argv[1:])))
