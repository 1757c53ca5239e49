"""Payloads and results outside Redis: fetched and written on separate threads, and deleted with their jobs."""
