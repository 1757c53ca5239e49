"""What the compiled kernels are written in: compiler, vectors, rows and memory."""
