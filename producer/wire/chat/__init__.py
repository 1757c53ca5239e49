"""Incremental parsers of reasoning and tool calls in a generated text."""
