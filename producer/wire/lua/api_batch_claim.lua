-- Take over an open batch that no gateway holds.
-- KEYS[1] prefix
-- ARGV[1] ms of the lease
-- Returns {id, token, {name, value...}}, or nothing
-- @include core/clock
local MAX_LEASE = 600000
bring_near(P .. 'ableases', MAX_LEASE, SOON, 16)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'ableases', '-inf', int(NOW), 'LIMIT', 0, 16)) do
  local key = P .. 'abatch:' .. id
  if redis.call('EXISTS', key) == 1 then
    redis.call('ZADD', P .. 'ableases', int(NOW + ARGV[1]), id)
    return {id, redis.call('HINCRBY', key, 'token', 1), redis.call('HGETALL', key)}
  end
  redis.call('ZREM', P .. 'ableases', id)
end
return {}
