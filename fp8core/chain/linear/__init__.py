"""The linear link: three GEMMs over three quantized tensors, dense or grouped.

Backward needs the input along the rows and the weight along its output features, so forward
quantizes each of them both ways and saves the second:

====== ============================ ============================ =====================
GEMM   a                            b                            result
====== ============================ ============================ =====================
fprop  input ``[m, k]``             weight ``[n, k]``            output ``[m, n]``
dgrad  grad_output ``[m, n]``       weight, turned ``[k, n]``    grad_input ``[m, k]``
wgrad  grad_output, turned ``[n, m]`` input, turned ``[k, m]``   grad_weight ``[n, k]``
====== ============================ ============================ =====================

A :class:`~fp8core.chain.linear.shape.LinearShape` says what a layer computes, and binds it: to the
quantizers of :mod:`fp8core.chain.linear.quantizers`, to GEMMs that
:mod:`fp8core.chain.linear.gemms` adapts, and, over several ranks, to the exchange of operands of
:mod:`fp8core.chain.linear.transfers`. Its :class:`~fp8core.chain.linear.link.LinearLink` gives each
call a :class:`~fp8core.chain.linear.program.LinearProgram`, which is all of the computation. What a
call adds wraps the program: :mod:`fp8core.chain.groups`, :mod:`fp8core.chain.padded`,
:mod:`fp8core.chain.main_grad`, :mod:`fp8core.chain.stochastic`; and
:mod:`fp8core.chain.requantized`, if the recipe has backward quantize weights again.
"""
