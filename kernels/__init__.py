"""The tensor operators: Triton, plain torch and CPU faces of each. Import the submodules."""
