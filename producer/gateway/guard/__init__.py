"""Checks before the application sees a request: the connection, its limits, and the request's origin."""
