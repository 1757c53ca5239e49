"""Formats that are converted before they are loaded: pickled weights and GGUF files."""
