"""Removing all that a queue has of one tenant, and the proof that nothing is left."""
