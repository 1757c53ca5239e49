"""OpenAI's formats, and files for its Batch API."""
