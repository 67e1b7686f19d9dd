"""Frameworks that train and run with fp8core: one module or package each."""
