"""Tests of the doctor, whose processes test a few operations of a backend."""

from fp8core.backend_api import OPS

_LONG = ("activation", "adam", "attention", "dispatch", "norm_backward", "rotary")

SHORT = tuple(op for op in OPS if not op.startswith(_LONG))
"""The operations whose self-tests take little time; ``test_report.py`` tests all of them."""
