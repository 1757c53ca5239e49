-- A queue at a glance, its lanes a page at a time.
-- KEYS[1] prefix
-- ARGV[1] cursor, '0' for the first page
-- Returns {names and counts by state, {lane, jobs, age of its oldest in ms} per waiting set of this page, leases, dead,
--   paused, jobs that follow an equal one, cursor of the next page or '0'}. A lane may be told twice.
-- @include common
local scanned = redis.call('SSCAN', P .. 'lanes', ARGV[1], 'COUNT', 1000)
local lanes = {}
for i, lane in ipairs(scanned[2]) do
  local first = redis.call('ZRANGE', P .. 'wait:' .. lane, 0, 0)[1] or ''
  local created = redis.call('HGET', P .. 'job:' .. split_member(first), 'at') or NOW
  lanes[i] = {lane, redis.call('ZCARD', P .. 'wait:' .. lane), int(math.max(0, NOW - created))}
end
local meta = redis.call('HMGET', P .. 'meta', 'paused', 'followers')
return {
  redis.call('HGETALL', P .. 'counts'), lanes, redis.call('ZCARD', P .. 'leases'), redis.call('ZCARD', P .. 'dead'),
  meta[1] == '1' and 1 or 0, tonumber(meta[2] or 0), scanned[1]
}
