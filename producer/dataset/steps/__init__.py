"""Runs of several steps a row: recipes, their jobs, and what they write."""
