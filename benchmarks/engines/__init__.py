"""The compared engines, each in a separate process."""
