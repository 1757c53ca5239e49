"""An engine that another program runs, behind an OpenAI-compatible HTTP interface."""
