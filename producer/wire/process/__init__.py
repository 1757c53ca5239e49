"""Shared parts of long-lived processes: stop signals, and the logging of their loops."""
