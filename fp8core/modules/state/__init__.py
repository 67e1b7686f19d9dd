"""The state of layers: delayed scales as buffers, and Transformer Engine's ``_extra_state``.

The delayed scales and amax histories travel in ``_extra_state`` as a pickle, which is read and
written as plain data, without ``pickle``: :mod:`reading` turns the bytes of one into plain values
and tensors, and refuses every class that such a state does not hold; :mod:`extra_state` turns the
values into a layer's buffers; :mod:`writing` writes the same bytes.
"""
