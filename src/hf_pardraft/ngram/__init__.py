"""The continuity model: n-grams counted once, stored, and looked up for a whole level of a tree."""
