"""The sections of `benchmarks.gpu`, one a file: each a function `run` from a `Bench` to rows."""
