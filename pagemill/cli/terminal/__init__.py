"""Option types and output of commands."""
