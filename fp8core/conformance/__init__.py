"""The conformance kit: tests whether a backend does as it declares.

``pytest --fp8core-backend=NAME``, or ``fp8core conformance NAME``, holds an installed backend to
the seven laws, for every operation and every descriptor that it declares:

1. ``quantize`` equals the reference bit for bit, data and scales, or is within the bound that the
   backend declares (:class:`fp8core.backend_api.Numerics`); stochastic rounding in distribution;
   NaN and inf are counted exactly
2. whoever supports a descriptor supports either half of it
3. both orientations in one call equal two calls
4. a product is within its bound of the float64 product of the dequantized operands; norms,
   activations and the other sums are within a few float32 roundings of float64; of any size, in
   any strides, into any ``out``, and infinity beyond the range
5. inputs are not written, except ``out``, ``amax_out`` and ``nonfinite_out``
6. a fused operation equals its unfused pair bit for bit
7. ``unsupported`` touches no tensor and denies descriptors that it does not know; a descriptor that
   it declares runs; a result depends on the arguments of its call alone

It reads from the bottom up: ``compare``, ``inputs``, ``subject`` (the backend, its device and its
judge), ``catalogue`` (every descriptor that a recipe asks for), ``calls`` (arguments for any
descriptor), ``checks`` (each law for each descriptor), ``laws/`` (the tests of the laws),
``collection`` (for pytest, with the report and the file of expected failures).
"""
