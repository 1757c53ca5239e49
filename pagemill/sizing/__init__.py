"""`pagemill doctor --plan`: resources for a load, estimated without running it."""
