"""A drafter for a target in one command: which commands are run one after another, for how long, and what came of them."""
