"""Telling others how a job ended."""
