"""A tiny trained family, and the command that shows it at work."""
