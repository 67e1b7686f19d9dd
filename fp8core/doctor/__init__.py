"""``fp8core doctor``: what is installed, what works here and why not, what is set."""
