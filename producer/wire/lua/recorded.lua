-- A job that has ended, with what it was submitted as.
-- KEYS[1] prefix
-- ARGV[1] id
-- Returns {its end as outcome.lua returns it, the payload or ''}; of one that has not ended, or an unknown one, the id
--   and the state alone
-- @include states
-- @include records
expire_if_late(ARGV[1])
local state = redis.call('HGET', P .. 'job:' .. ARGV[1], 'state')
if not state or not has_ended(state) then
  return {{ARGV[1], state or '', '', '', '', '', '', '', {}}, ''}
end
local record = end_record(ARGV[1])
return {record, redis.call('GET', P .. 'in:' .. ARGV[1]) or ''}
