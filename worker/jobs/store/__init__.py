"""Payloads and results outside Redis: fetched and written on threads of their own, and deleted when their jobs are."""
