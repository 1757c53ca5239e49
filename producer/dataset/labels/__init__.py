"""Probabilities of labels in a dataset run: their columns, and how well they are calibrated."""
