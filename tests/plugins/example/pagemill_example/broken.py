"""A module that cannot be imported."""

raise RuntimeError("a part is missing")
