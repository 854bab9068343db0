"""Products with weights in a layout that a CPU reads faster, made once and kept beside the weights."""
