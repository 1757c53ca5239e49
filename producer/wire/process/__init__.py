"""Shared parts of the long-lived processes of both sides: stop signals, and the logging of their loops."""
