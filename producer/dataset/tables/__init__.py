"""Rows from files, and back."""
