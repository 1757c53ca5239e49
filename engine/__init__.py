"""Continuous batching over a paged KV cache. Knows tokens and requests, never jobs."""
