"""Data only: makes the sources findable as ``importlib.resources.files("fp8core_backends.csrc")``.

Without this file the folder would be a namespace package, which an editable install cannot find
below another package.
"""
