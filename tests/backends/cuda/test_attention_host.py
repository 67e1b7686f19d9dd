"""The host's part of attention on CUDA, on the CPU: with cuDNN stood in for, the kit's laws hold.

They cover the tensors, strides, offsets, lengths and masks that cuDNN is given, and the rows that
see nothing. What cuDNN computes from them is tested in test_attention.py, on a device.
"""

from __future__ import annotations

import pytest
import torch

from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc
from fp8core.testing import laws  # noqa: F401  importing fills the laws
from fp8core.testing.catalogue import catalogue
from fp8core.testing.checks import LAWS
from fp8core.testing.subject import Subject
from tests.backends.cuda.attention_stand_in import CPU, StandIn
from tests.backends.cuda.cuda_cases import backend

ENTRIES = [
    entry for entry in catalogue() if isinstance(entry.desc, AttentionDesc | AttentionBackwardDesc)
]


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> Subject:
    judge = backend("reference")
    return Subject("cuda", StandIn(monkeypatch), CPU, judge)


@pytest.mark.parametrize("label", [entry.label for entry in ENTRIES])
def test_every_law_of_the_kit_holds(subject: Subject, label: str) -> None:
    desc = next(entry.desc for entry in ENTRIES if entry.label == label)
    forward = desc if isinstance(desc, AttentionDesc) else desc.attention
    is_refused = subject.refuses(desc) is not None
    is_declined = (
        forward.dtype not in (torch.bfloat16, torch.float16)
        or forward.softcap > 0
        or forward.bias == "alibi"
    )
    assert is_refused == is_declined, subject.refuses(desc)
    if is_refused:
        return
    for law in LAWS.values():
        if desc.op in law.ops and law.applies(desc) and not law.is_strict:
            law.test(subject, desc)
