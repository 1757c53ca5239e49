-- Set and return the limits of a queue. Without further arguments nothing is changed.
-- KEYS[1] prefix
-- ARGV pairs of name and value, '' to remove the queue's own limit: limit (jobs that may wait), max_payload (bytes),
--   rate (jobs per second that may start), burst (how many of them together), and memory_share (of the server's
--   maxmemory, up to which jobs are accepted)
-- Returns names and values of the limits that are set
-- @include records
local NAMES = {'limit', 'max_payload', 'rate', 'burst', 'memory_share'}
local known = {}
for _, name in ipairs(NAMES) do
  known[name] = true
end
for i = 1, #ARGV, 2 do
  local value = tonumber(ARGV[i + 1])
  if not known[ARGV[i]] or (ARGV[i + 1] ~= '' and not (value and value > 0 and value <= 1e12)) then
    return redis.error_reply('PAGEMILL bad limit at ARGV ' .. i)
  end
end
for i = 1, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', P .. 'meta', ARGV[i])
  else
    redis.call('HSET', P .. 'meta', ARGV[i], ARGV[i + 1])
  end
end
if #ARGV > 0 then
  -- A bucket of a different size or rate starts full.
  redis.call('HDEL', P .. 'meta', 'level', 'level_at', 'memory_looked', 'memory_at')
end
return named(NAMES, redis.call('HMGET', P .. 'meta', unpack(NAMES)))
