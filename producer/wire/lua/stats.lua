-- Return a summary of a queue, and one page of its lanes.
-- KEYS[1] prefix
-- ARGV[1] cursor, '0' for the first page
-- Returns names and values: counts (by state), lanes ({lane, jobs, age of its oldest in ms} per waiting set of this
--   page), leases, dead, paused, followers (jobs that follow an equal one), cursor (of the next page, or '0'), memory
--   (names and values: used, in bytes; most, the maxmemory; share, of it for submits; refused, jobs rejected because it
--   ran out). A lane may be listed twice. Without a maxmemory, or if the server does not report it, both sizes are 0.
-- @include core/memory
local scanned = redis.call('SSCAN', P .. 'lanes', ARGV[1], 'COUNT', 1000)
local lanes = {}
for i, lane in ipairs(scanned[2]) do
  local first = redis.call('ZRANGE', P .. 'wait:' .. lane, 0, 0)[1] or ''
  local created = redis.call('HGET', P .. 'job:' .. split_member(first), 'at') or NOW
  lanes[i] = {lane, redis.call('ZCARD', P .. 'wait:' .. lane), int(math.max(0, NOW - created))}
end
local meta = redis.call('HMGET', P .. 'meta', 'paused', 'followers', 'memory_share', 'memory_rejections')
local memory = ARGV[1] == '0' and read_memory() or {0, 0}
return {
  'counts', redis.call('HGETALL', P .. 'counts'), 'lanes', lanes, 'leases', redis.call('ZCARD', P .. 'leases'),
  'dead', redis.call('ZCARD', P .. 'dead'), 'paused', meta[1] == '1' and 1 or 0, 'followers', tonumber(meta[2] or 0),
  'cursor', scanned[1], 'memory', {
    'used', memory[1], 'most', memory[2], 'share', meta[3] or tostring(MEMORY_SHARE), 'refused', tonumber(meta[4] or 0)
  }
}
