-- Stop or resume pulling from a queue.
-- KEYS[1] prefix
-- ARGV[1] 1 to pause, 0 to resume
-- Returns 1
-- @include common
if ARGV[1] == '1' then
  redis.call('HSET', P .. 'meta', 'paused', '1')
else
  redis.call('HDEL', P .. 'meta', 'paused')
  for _, lane in ipairs(redis.call('SMEMBERS', P .. 'lanes')) do
    local _, _, _, model = split_lane(lane)
    ring(model)
  end
end
return 1
