"""Drafts of tokens to come, computed along with the newest one and kept as far as sampling agrees."""
