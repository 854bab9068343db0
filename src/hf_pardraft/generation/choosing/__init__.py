"""How tokens are chosen: what processors make of logits, the likeliest, plain `generate`'s own draw, rejection sampling."""
