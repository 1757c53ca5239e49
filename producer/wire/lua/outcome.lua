-- The end of one job, if it has come.
-- KEYS[1] prefix
-- ARGV[1] id
-- Returns {id, state or '' (no such job), key, metadata, result or error, id it copied its end from or '',
--   created_at, finished_at, checkpoint entries unless it succeeded}
-- @include core/states
-- @include records
expire_if_late(ARGV[1])
local state = redis.call('HGET', P .. 'job:' .. ARGV[1], 'state')
if state and not has_ended(state) then
  return {ARGV[1], state, '', '', '', '', '', '', {}}
end
return (end_record(ARGV[1]))
