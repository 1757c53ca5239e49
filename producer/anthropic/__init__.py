"""Anthropic's Messages API as jobs."""
