"""The sections of `benchmarks.gpu`, one per file: each a function `run` from a `Bench` to rows."""
