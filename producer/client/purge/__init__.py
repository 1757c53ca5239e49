"""Removal of all data of a tenant from a queue, and the proof that none is left."""
