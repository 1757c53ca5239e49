"""The long-lived process between Redis and the engine."""
