-- A queue at a glance.
-- KEYS[1] prefix
-- Returns {names and counts by state, {lane, jobs, age of its oldest in ms} per waiting set, leases, dead, paused}
-- @include common
local lanes = {}
for i, lane in ipairs(redis.call('SMEMBERS', P .. 'lanes')) do
  local id = redis.call('ZRANGE', P .. 'wait:' .. lane, 0, 0)[1]
  local created = id and redis.call('HGET', P .. 'job:' .. id, 'created_at') or NOW
  lanes[i] = {lane, redis.call('ZCARD', P .. 'wait:' .. lane), int(math.max(0, NOW - created))}
end
return {
  redis.call('HGETALL', P .. 'counts'), lanes, redis.call('ZCARD', P .. 'leases'), redis.call('ZCARD', P .. 'dead'),
  redis.call('HGET', P .. 'meta', 'paused') == '1' and 1 or 0
}
