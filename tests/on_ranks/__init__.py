"""What the owner of several GPUs runs: ``python -m tests.on_ranks``."""
