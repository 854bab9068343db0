"""What compiling rounds needs, and nothing else does: a static KV cache, step functions of fixed shapes, guards."""
