"""How fast a drafter makes its target, and whether the text stayed the same."""
