-- A queue at a glance, its lanes a page at a time.
-- KEYS[1] prefix
-- ARGV[1] cursor, '0' for the first page
-- Returns {names and counts by state, {lane, jobs, age of its oldest in ms} per waiting set of this page, leases, dead,
--   paused, jobs that follow an equal one, cursor of the next page or '0', {bytes of memory in use, maxmemory, share of
--   it for submits, jobs refused for want of it}}. A lane may be told twice. Without a maxmemory, or where the server does not
--   tell it, both bytes are 0.
-- @include core/memory
local scanned = redis.call('SSCAN', P .. 'lanes', ARGV[1], 'COUNT', 1000)
local lanes = {}
for i, lane in ipairs(scanned[2]) do
  local first = redis.call('ZRANGE', P .. 'wait:' .. lane, 0, 0)[1] or ''
  local created = redis.call('HGET', P .. 'job:' .. split_member(first), 'at') or NOW
  lanes[i] = {lane, redis.call('ZCARD', P .. 'wait:' .. lane), int(math.max(0, NOW - created))}
end
local meta = redis.call('HMGET', P .. 'meta', 'paused', 'followers', 'memory_share', 'memory_refused')
local memory = ARGV[1] == '0' and read_memory() or {0, 0}
return {
  redis.call('HGETALL', P .. 'counts'), lanes, redis.call('ZCARD', P .. 'leases'), redis.call('ZCARD', P .. 'dead'),
  meta[1] == '1' and 1 or 0, tonumber(meta[2] or 0), scanned[1],
  {memory[1], memory[2], meta[3] or tostring(MEMORY_SHARE), tonumber(meta[4] or 0)}
}
