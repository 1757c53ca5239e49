"""Shared definitions: bounds, sampling fields, JSON values, error codes. Does not import other parts of Pagemill."""
