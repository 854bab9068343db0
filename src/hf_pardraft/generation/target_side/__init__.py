"""The target's side of a round: what it reads, its cache, what plain `generate` would give it, and what it is made of."""
