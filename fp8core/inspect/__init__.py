"""What would run, and what a recipe asks a backend for."""
