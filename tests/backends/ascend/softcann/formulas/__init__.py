"""What each operator computes, by its document in CANN's operator repositories, in float32.

Arguments are those of ``aclnnXGetWorkspaceSize``, in its order. The last ones are the results.
Importing this package registers them.
"""

from __future__ import annotations

from tests.backends.ascend.softcann.formulas import (  # noqa: F401  each registers its formulas
    attention,
    casts,
    layers,
    products,
    torch_operators,
)
