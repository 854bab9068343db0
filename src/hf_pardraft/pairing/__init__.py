"""A drafter and its target: made to fit, checked for it, and what is remembered of the one that it was trained for."""
