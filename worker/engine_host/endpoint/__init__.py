"""An engine that another program serves through an OpenAI-compatible HTTP interface."""
