"""Checkpoints on disk: layouts read and written, converted, checked, and saved as a whole or not at all."""
