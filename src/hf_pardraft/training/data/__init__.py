"""Examples: where they come from, as token ids with labels, packed."""
