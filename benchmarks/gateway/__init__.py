"""The cost of HTTP; `python -m benchmarks.gateway`."""
