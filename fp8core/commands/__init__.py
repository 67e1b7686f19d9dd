"""What the commands share: their arguments, and the small ones themselves."""
