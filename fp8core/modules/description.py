"""What a layer's ``repr`` says of the way it last ran."""

from __future__ import annotations

from typing import Any

from fp8core.modules.bound import Bound, recipe_of
from fp8core.recipe.plan import LayerRole, LinearPlan

__all__ = ["last_run"]


def last_run(last: tuple[Any, Any] | None, kind: str, name: str | None) -> list[str]:
    """Return the recipe and the backends of a layer's last call, as one item; none before it.

    ``last`` is the layer's last entry in its :class:`~fp8core.modules.bindings.Bindings`.
    """
    if last is None:
        return []
    bound: Bound = last[1]
    chosen = recipe_of(bound, LayerRole(kind, name))
    ran = [choice for link in bound.linears for choice in link.choices.values()]
    if isinstance(bound.plan, LinearPlan):
        is_low = not ran or any(choice.desc.low_precision for choice in ran)
    else:
        is_low = not bound.plan.is_high_precision
    recipe = type(chosen).__name__ if chosen is not None and is_low else "high precision"
    backends = dict.fromkeys(link.choices["fprop"].backend for link in bound.linears)
    return [f"last run: {' '.join([recipe, *(f'on {backend}' for backend in backends)])}"]
