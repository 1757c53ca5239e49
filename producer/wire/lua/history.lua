-- All that is recorded of one job's way, without its prompt and its output.
-- KEYS[1] prefix
-- ARGV[1] id
-- Returns nothing for an unknown job, or {names and values of its record, executions that did not end it (JSON),
--   the last error or '', live workers for its model}
-- @include common
local key = P .. 'job:' .. ARGV[1]
local lane = redis.call('HGET', key, 'lane')
if not lane then
  return {}
end
local _, _, _, model = split_lane(lane)
local out = redis.call('HGET', key, 'state') ~= 'succeeded' and redis.call('GET', P .. 'out:' .. ARGV[1])
return {
  redis.call('HGETALL', key), redis.call('LRANGE', P .. 'history:' .. ARGV[1], 0, -1), out or '',
  redis.call('ZCOUNT', P .. 'serves:' .. model, int(NOW), '+inf')
}
