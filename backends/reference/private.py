"""The private names of torch that this backend uses; in torch 2.11 and in torch 2.13.

Where a later torch lacks one, importing the backend raises an AttributeError that names it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor

# Copies a list of tensors into another in one call.
copy_all: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
