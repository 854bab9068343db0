"""Training drafters: batches, masks, losses, and a `Trainer` that puts them together."""
