-- A webhook delivery was made, given up, or is to be tried again.
-- KEYS[1] prefix
-- ARGV[1] id  [2] the try that this is about  [3] ms until the next one, or -1: there is none
-- Returns 1, or 0 if somebody else has claimed it since (nothing changed)
-- @include common
local id = ARGV[1]
local tries = redis.call('HGET', P .. 'job:' .. id, 'notified')
if tries and tries ~= ARGV[2] then
  return 0
end
redis.call('ZREM', P .. 'outbox', id)
if tries and tonumber(ARGV[3]) >= 0 then
  redis.call('ZADD', P .. 'outbox', int(NOW + ARGV[3]), id)
end
return 1
