"""A module that can't be imported."""

raise RuntimeError("a part is missing")
