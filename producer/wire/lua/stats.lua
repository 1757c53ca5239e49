-- A queue at a glance.
-- KEYS[1] prefix
-- Returns {names and counts by state, {lane, jobs, age of its oldest in ms} per waiting set, leases, dead, paused,
--   jobs that follow an equal one}
-- @include common
local lanes = {}
for i, lane in ipairs(redis.call('SMEMBERS', P .. 'lanes')) do
  local first = redis.call('ZRANGE', P .. 'wait:' .. lane, 0, 0)[1] or ''
  local created = redis.call('HGET', P .. 'job:' .. split_member(first), 'at') or NOW
  lanes[i] = {lane, redis.call('ZCARD', P .. 'wait:' .. lane), int(math.max(0, NOW - created))}
end
local meta = redis.call('HMGET', P .. 'meta', 'paused', 'followers')
return {
  redis.call('HGETALL', P .. 'counts'), lanes, redis.call('ZCARD', P .. 'leases'), redis.call('ZCARD', P .. 'dead'),
  meta[1] == '1' and 1 or 0, tonumber(meta[2] or 0)
}
