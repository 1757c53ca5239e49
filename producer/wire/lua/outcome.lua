-- Return the end of a job, if it has ended.
-- KEYS[1] prefix
-- ARGV[1] id
-- Returns names and values of its end, as `end_record` returns them; id and state if it has not ended; only the id if
--   it is unknown
-- @include core/states
-- @include records
expire_if_late(ARGV[1])
local state = redis.call('HGET', P .. 'job:' .. ARGV[1], 'state')
if state and not has_ended(state) then
  return {'id', ARGV[1], 'state', state}
end
return (end_record(ARGV[1]))
