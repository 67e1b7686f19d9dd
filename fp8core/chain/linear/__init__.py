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

A :class:`~fp8core.chain.linear.shape.LinearShape` says what a layer computes, and binds it: to
quantizers, which also say how operands travel between ranks, and to GEMMs that
:mod:`fp8core.chain.linear.gemms` adapts. The bound link gives each call a
:class:`~fp8core.chain.linear.program.LinearProgram`, which is all of the computation. What a layer
or a call adds wraps the program: :mod:`fp8core.chain.linear.wrappers`.
"""
