"""The devices that a model runs on, one per file."""
