-- Keep the results of an accused worker: it may pull again, and the agreement on its canaries starts over.
-- KEYS[1] prefix
-- ARGV[1] worker  [2] 1: only clear its list, it stays quarantined
-- Returns 1, 0 if it is not accused, or -1 if the call must be repeated
-- @include trails
local worker = ARGV[1]
if not redis.call('ZRANK', P .. 'accused', worker) then
  return 0
end
redis.call('ZREM', P .. 'outbox', '') -- a removal, so that the later writes pass at maxmemory
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
