"""Probabilities of labels in a dataset run: their columns, and their calibration."""
