"""Decoding by number of rows, compared with peers."""
