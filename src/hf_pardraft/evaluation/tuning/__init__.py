"""The draft that pays best at each batch size: found by a cost model, measured, and written into the drafter."""
