"""A whole decoder layer as a few compiled calls."""
