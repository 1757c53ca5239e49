"""Calls that only a gateway makes: its files, its batches, its callers' rates and waiters."""
