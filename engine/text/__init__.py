"""Conversion between text and tokens, for inputs and outputs."""
