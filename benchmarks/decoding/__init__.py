"""Decoding by number of rows, beside peers."""
