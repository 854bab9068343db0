"""What compiling rounds needs, and nothing else does: buffers of fixed shapes, steps, guards."""
