"""Mutants of the core, to show that a change of the tests loses nothing; see ``__main__``."""
