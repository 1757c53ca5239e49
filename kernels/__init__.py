"""The tensor operators: Triton, plain torch and CPU implementations of each. Import the submodules."""
