"""Incremental parsers of reasoning and tool calls in generated text."""
