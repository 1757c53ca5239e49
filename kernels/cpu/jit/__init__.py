"""The building blocks of compiled kernels: compiler, vectors, rows and memory."""
