"""The syntax in which models write thinking and tool calls: families, and incremental parsers. No heavy imports."""
