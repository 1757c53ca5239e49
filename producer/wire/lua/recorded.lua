-- A job that has ended, with what it was submitted as.
-- KEYS[1] prefix
-- ARGV[1] id
-- Returns {its end as outcome.lua returns it, the payload or ''}; of one that has not ended, or an unknown one, the id,
--   the state and the time of its submission
-- @include core/states
-- @include records
-- @include outputs
expire_if_late(ARGV[1])
local job = redis.call('HMGET', P .. 'job:' .. ARGV[1], 'state', 'at')
if not job[1] or not has_ended(job[1]) then
  return {{ARGV[1], job[1] or '', '', '', '', '', job[2] or '', '', {}}, payload_of(ARGV[1])}
end
local record = end_record(ARGV[1])
return {record, payload_of(ARGV[1])}
