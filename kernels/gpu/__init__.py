"""The face for CUDA tensors, in Triton."""
