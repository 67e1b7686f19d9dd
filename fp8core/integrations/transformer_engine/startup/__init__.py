"""The folder that ``fp8core run --as-transformer-engine`` puts on PYTHONPATH."""
