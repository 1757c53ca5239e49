-- All that is recorded of one job's way, without its prompt and its output.
-- KEYS[1] prefix
-- ARGV[1] id
-- Returns nothing for an unknown job, or {names and values of its record, executions that did not end it (JSON),
--   the last error or '', live workers for its model}
-- @include records
local key = P .. 'job:' .. ARGV[1]
local job = redis.call('HMGET', key, 'lane', 'state', 'shared')
if not job[1] then
  return {}
end
local _, _, _, model = split_lane(job[1])
return {
  redis.call('HGETALL', key), redis.call('LRANGE', P .. 'history:' .. ARGV[1], 0, -1),
  job[2] ~= 'succeeded' and outcome_of(ARGV[1], job[3]) or '',
  redis.call('ZCOUNT', P .. 'serves:' .. model, int(NOW), '+inf')
}
