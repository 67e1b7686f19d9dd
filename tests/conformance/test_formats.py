"""The kit judges a backend in a plug-in's format, whatever codes that lacks."""

from __future__ import annotations

import pytest
import torch

from fp8core.backend_api import DequantizeDesc, GemmDesc, OperandSpec, QuantizeDesc
from fp8core.conformance.catalogue import CatalogueEntry
from fp8core.conformance.checks import checks
from fp8core.conformance.laws import LAWS
from fp8core.conformance.subject import Subject
from fp8core_backends.reference.backend import ReferenceBackend
from tests.dispatch import toys

SPEC = OperandSpec("toy8", (1, 0), toys.TOY8.max)
DESCS = (
    QuantizeDesc(torch.bfloat16, SPEC, SPEC),
    DequantizeDesc(SPEC, torch.bfloat16),
    GemmDesc(SPEC, SPEC, torch.bfloat16),
)


@pytest.mark.usefixtures("isolated")
def test_sound_backend_of_a_format_of_256_finite_codes_passes() -> None:
    toys.register(own_formats=[toys.TOY8])
    laws = [law for law in LAWS.values() if law.ops]  # of operations, not of the whole backend
    subject = Subject("sound", ReferenceBackend(), toys.CPU, ReferenceBackend())
    for check in checks(subject, laws, [CatalogueEntry(desc.op, desc) for desc in DESCS]):
        check.run()
