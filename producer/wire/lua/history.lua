-- Return the recorded history of a job, without its prompt and its output.
-- KEYS[1] prefix
-- ARGV[1] id
-- Returns nothing for an unknown job, or names and values: record (names and values), notice_at (when its webhook is
--   called, or ''), executions (that did not end it, as JSON), error (the last one or ''), live_workers (for its model),
--   is_unmet (1 if none knows all it needs)
-- @include executions
return executions_of(ARGV[1]) or {}
