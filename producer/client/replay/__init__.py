"""Replays: a job that has succeeded runs again, and the two results are compared."""
