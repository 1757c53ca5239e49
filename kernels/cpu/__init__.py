"""The fast implementation for CPU tensors, compiled by numba; other code calls `operators` and `layer`."""
