"""Attention as a link: the rows of the chain are the queries, keys and values are parameters.

An :class:`~fp8core.chain.attention.shape.AttentionShape` says what is computed, and binds it to
operations of backends: an :class:`~fp8core.chain.attention.link.AttentionLink` in high precision, a
:class:`~fp8core.chain.attention.low_precision.LowPrecisionAttentionLink` where the recipe quantizes
queries, keys and values. :class:`~fp8core.chain.attention.spec.AttentionTensors` are the masks and
lengths that a call brings. :mod:`fp8core.chain.packed_attention` runs either link on the rows of
one projection; :mod:`fp8core.chain.context_parallel` spreads it over the ranks of a group.
"""
