"""Runs with several steps per row: recipes, their jobs, and their output."""
