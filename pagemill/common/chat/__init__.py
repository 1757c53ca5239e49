"""The syntax in which models write reasoning and tool calls: one table entry per family."""
