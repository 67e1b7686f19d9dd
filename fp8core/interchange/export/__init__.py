"""Models for other runtimes: :func:`to_onnx` writes an ONNX file.

torch.export and AOTInductor take models of fp8core as they are; docs/export.md shows all three.
"""

from fp8core.interchange.export.onnx_file import to_onnx

__all__ = ["to_onnx"]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
