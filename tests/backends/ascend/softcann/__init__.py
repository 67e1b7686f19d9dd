"""A software replacement of CANN, on which the published torch_npu runs without an NPU.

``build`` compiles stand-ins of CANN's C libraries from the installed wheel: memory of the device is
memory of the host (``runtime.c``), and an operator records its tensors' descriptors and calls back
(``operators.c``, ``device``) to the formula that CANN's documents give for it (``formulas``). What
has no stand-in fails, and says so. The arithmetic is float32 on the CPU, not that of an NPU.
"""
