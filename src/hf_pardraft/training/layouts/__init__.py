"""One layout of batches each: how it is collated, masked, and read into supervised positions."""
