-- Return an ended job with its payload.
-- KEYS[1] prefix
-- ARGV[1] id
-- Returns {its end as outcome.lua returns it, the payload or ''}; for a job that has not ended also `at`, its
--   submission time
-- @include core/states
-- @include records
-- @include outputs
expire_if_late(ARGV[1])
local job = redis.call('HMGET', P .. 'job:' .. ARGV[1], 'state', 'at')
if not job[1] or not has_ended(job[1]) then
  return {named({'id', 'state', 'at'}, {ARGV[1], job[1], job[2]}), payload_of(ARGV[1])}
end
return {(end_record(ARGV[1])), payload_of(ARGV[1])}
