"""What a round proposes, and how much of it is right: token trees, beam search, verification. Pure."""
