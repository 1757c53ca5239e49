"""Payloads and results that are too large for Redis: files below one URL, named in Redis by their hash."""
