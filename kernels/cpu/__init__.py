"""The fast face for CPU tensors, compiled by numba; `operators` and `layer` are what the rest of the code calls."""
