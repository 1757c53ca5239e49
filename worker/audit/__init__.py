"""Mutual audits of workers: canaries, and the quarantine of a worker with different results."""
