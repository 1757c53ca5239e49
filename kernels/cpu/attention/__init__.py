"""Paged attention on a CPU, for single tokens and for prompts."""
