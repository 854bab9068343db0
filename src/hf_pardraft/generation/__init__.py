"""From a drafter's marginal logits to committed tokens: the tree, its verification, the cache, and the loop."""
