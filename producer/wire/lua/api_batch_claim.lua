-- Take over an open batch that no gateway holds.
-- KEYS[1] prefix
-- ARGV[1] ms of the lease
-- Returns {id, token, {name, value...}}, or nothing
-- @include common
-- No lease is longer: a clock that was set back left those.
local MAX_LEASE = 600000
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'ableases', int(NOW + MAX_LEASE + 1), '+inf', 'LIMIT', 0, 16)) do
  redis.call('ZREM', P .. 'ableases', id)
  redis.call('ZADD', P .. 'ableases', int(NOW + 10000), id)
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'ableases', '-inf', int(NOW), 'LIMIT', 0, 16)) do
  local key = P .. 'abatch:' .. id
  if redis.call('EXISTS', key) == 1 then
    redis.call('ZADD', P .. 'ableases', int(NOW + ARGV[1]), id)
    return {id, redis.call('HINCRBY', key, 'token', 1), redis.call('HGETALL', key)}
  end
  redis.call('ZREM', P .. 'ableases', id)
end
return {}
