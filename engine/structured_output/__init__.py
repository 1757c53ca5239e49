"""Constrained outputs: what a sequence may generate next, as a `Grammar` that the scheduler follows token by token."""
