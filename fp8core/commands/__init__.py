"""Small commands, and the arguments that several commands take."""
