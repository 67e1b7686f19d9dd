"""Transformer Engine's ``_extra_state``: read and written as plain data, without ``pickle``.

A layer's delayed scales and amax histories travel in it as a pickle. :mod:`opcodes` reads the
opcodes of one into plain values, and refuses every class that such a state does not hold;
:mod:`tensors` rebuilds torch's tensors; :mod:`state` turns the values into a layer's buffers;
:mod:`writing` writes the same bytes.
"""

from __future__ import annotations
