"""The directive ``support-matrix``: operations and recipes that each installed backend supports.

It asks the backends while the pages are built. There is a table for each backend and device type;
its cells are those of ``fp8core doctor``.
"""

from __future__ import annotations

from typing import Any

import torch
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from fp8core.dispatch import plugins
from fp8core.doctor import findings


class SupportMatrix(SphinxDirective):
    """One table for each installed backend and each kind of device, as its declarations say."""

    def run(self) -> list[nodes.Node]:
        """Return the tables, and the reasons for refusals."""
        return self.parse_text_to_nodes("\n".join(lines()))


def lines() -> list[str]:
    """Return the tables in Markdown."""
    registry = plugins.load()
    specs = registry.by_priority()
    # torch knows the names of some devices, "npu" for one, by their plug-ins alone.
    usable = [spec for spec in specs if registry.unusable(spec) is None]
    kinds = dict.fromkeys(kind for spec in usable for kind in spec.device_types if kind != "meta")
    needs = findings.needs_by_recipe()
    text: list[str] = []
    for spec in specs:
        reason = registry.unusable(spec)
        if reason is not None:
            text += [f"**{spec.name}** could not be asked here: {reason}", ""]
            continue
        native = [kind for kind in kinds if kind in spec.device_types]
        others = [kind for kind in (*kinds, "cuda") if kind not in native] if spec.portable else []
        for kind in dict.fromkeys([*native, *others]):
            answers = findings.cells(spec, torch.device(kind), needs)
            heading, *rows = findings.rows(answers)
            text += [f"**{spec.name}** on `{kind}`", ""]
            text += [_row(["operation", *heading[1:]]), _row(["---"] * len(heading))]
            text += [_row([f"`{row[0]}`", *row[1:]]) for row in rows]
            text += ["", *(f"- {line}" for line in findings.unanswered(answers)), ""]
    return text


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("support-matrix", SupportMatrix)
    return {"parallel_read_safe": True}
