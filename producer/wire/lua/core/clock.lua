-- If the clock is set back, stored times lie in the future: docs/reliability.md lists them.
local SOON = 10000

-- Find members of a sorted set of times that lie further ahead than `most` ms, and move them to `soon` ms from now.
local function bring_near(key, most, soon, limit)
  local far = redis.call('ZRANGEBYSCORE', key, int(NOW + most + 1), '+inf', 'LIMIT', 0, limit)
  for _, id in ipairs(far) do
    -- The removal comes first, so that the write passes at maxmemory.
    redis.call('ZREM', key, id)
    redis.call('ZADD', key, int(NOW + soon), id)
  end
  return far
end
