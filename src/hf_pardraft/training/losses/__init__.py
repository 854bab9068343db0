"""Objectives: from logits to sums over drafted blocks. Pure, but for what a model has to be asked."""
