"""From values to objects: the shapes of a chain become its links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fp8core.chain.protocol import Link
from fp8core.chain.shape import BindContext, LinkShape, Neighbour


def bind_chain(shapes: Sequence[LinkShape], context: BindContext) -> tuple[Link, ...]:
    """Bind the links of ``shapes``, each knowing its neighbours.

    Links that quantize come first, as the others ask them what to hand over. The others are bound
    from the last to the first, as a link may leave work to the one after it.

    Raises:
        UnsupportedError: no backend runs one of the operations on the device; GEMMs are asked
            first, so that the message is about them.
    """
    links: dict[int, Link] = {}
    positions = range(len(shapes))

    def neighbour(position: int) -> Neighbour | None:
        if position not in positions:
            return None
        return Neighbour(shapes[position], links.get(position))

    def computing(nearest: Iterable[int]) -> Neighbour | None:
        computes = (at for at in nearest if shapes[at].movement is None)
        return neighbour(next(computes, -1))

    is_parallel = any(shape.movement is not None for shape in shapes)
    quantizing = [position for position in positions if shapes[position].quantizes]
    others = [position for position in positions if not shapes[position].quantizes]
    for position in (*quantizing, *reversed(others)):
        own_context = context._replace(
            position=position,
            first_gemm=context.first_gemm + sum(one.num_weights for one in shapes[:position]),
            before=neighbour(position - 1),
            after=neighbour(position + 1),
            source=computing(range(position - 1, -1, -1)),
            target=computing(range(position + 1, len(shapes))),
            is_parallel=is_parallel,
        )
        links[position] = shapes[position].bind(own_context)
    return tuple(links[position] for position in positions)
