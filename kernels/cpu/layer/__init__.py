"""A complete decoder layer as a few compiled calls."""
