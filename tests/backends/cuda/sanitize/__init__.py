"""Every kernel of csrc under compute-sanitizer."""
