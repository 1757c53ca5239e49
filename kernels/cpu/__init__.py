"""The fast implementation for CPU tensors, compiled by numba. Other code calls `operators` and `layer`."""
