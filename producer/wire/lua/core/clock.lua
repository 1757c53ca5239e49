-- A clock that is set back leaves stored times in the future: docs/reliability.md lists them.
local SOON = 10000

-- Members of a sorted set of times that lie further ahead than `most` ms: they come `soon` ms from now instead.
local function bring_near(key, most, soon, limit)
  local far = redis.call('ZRANGEBYSCORE', key, int(NOW + most + 1), '+inf', 'LIMIT', 0, limit)
  for _, id in ipairs(far) do
    -- Removed first, so that it passes at maxmemory.
    redis.call('ZREM', key, id)
    redis.call('ZADD', key, int(NOW + soon), id)
  end
  return far
end
