-- What an accused worker committed stays as it is: it may pull again, and what the canaries gave is agreed on anew.
-- KEYS[1] prefix
-- ARGV[1] worker  [2] 1: only its list is over, it stays quarantined
-- Returns 1, or 0: it is not accused; or -1: call again, there is more to forget
-- @include trails
local worker = ARGV[1]
if not redis.call('ZRANK', P .. 'accused', worker) then
  return 0
end
redis.call('ZREM', P .. 'outbox', '') -- a removal, so that the rest passes at maxmemory
local found = redis.call('HMGET', P .. 'audit:' .. worker, 'base', 'what')
redis.call('HSET', P .. 'audit:' .. worker, 'clean_to', int((found[1] or 0) + redis.call('LLEN', P .. 'did:' .. worker)))
local _, has_more = trails.trim(worker)
if has_more then
  return -1
end
redis.call('ZREM', P .. 'accused', worker)
if ARGV[2] ~= '1' then
  redis.call('UNLINK', P .. 'agreed:' .. (found[2] or ''))
  redis.call('HDEL', P .. 'audit:' .. worker, 'reason', 'accused_at')
  redis.call('HSET', P .. 'audit:' .. worker, 'state', 'kept')
end
return 1
