"""Constrained outputs: a `Grammar` limits a sequence's next tokens; the scheduler advances it."""
