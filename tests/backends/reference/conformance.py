"""The kit's laws of an operation, for descriptors that no recipe asks for."""

from __future__ import annotations

from fp8core.backend_api import OpDesc
from fp8core.conformance.catalogue import CatalogueEntry
from fp8core.conformance.checks import checks
from fp8core.conformance.laws import LAWS
from fp8core.conformance.subject import find

LONG = (
    "gemm_takes_any_m_n_and_k",
    "grouped_gemm_takes_many_groups",
    "grouped_gemm_takes_groups_of_any_size",
)


def broken_laws(*descs: OpDesc) -> list[str]:
    """Check the reference backend by the laws about these operations alone; return what fails.

    Those about thousands of rows, columns and terms are left out: they are of no more formats.
    """
    subject = find("reference")
    ops = {desc.op for desc in descs}
    laws = [law for law in LAWS.values() if len(law.ops) == 1 and law.ops[0] in ops]
    laws = [law for law in laws if law.name not in LONG]
    entries = [CatalogueEntry(str(desc), desc) for desc in descs]
    made = list(checks(subject, laws, entries))
    assert {check.label for check in made} == {entry.label for entry in entries}
    faults = []
    for check in made:
        try:
            check.run()
        except Exception as error:  # noqa: BLE001  whatever it is, it is a failure of this check
            faults.append(f"{check.id}: {type(error).__name__}: {error}")
    return faults
