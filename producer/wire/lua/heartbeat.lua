-- Register a worker, or keep it registered. Silent ones are forgotten by sweep.
-- KEYS[1] prefix
-- ARGV[1] worker id  [2] time to live in ms  [3] what it says about itself, as JSON  [4] the part of it that the first
--   release reads, which refuses fields that it does not know  [5] and on: its models
-- Returns 1
-- @include common
local MAX_TTL = 600000
redis.call('HDEL', P .. 'meta', '') -- a removal, so that the rest passes at maxmemory
redis.call('ZADD', P .. 'workers', int(NOW + ARGV[2]), ARGV[1])
redis.call('SET', P .. 'worker:' .. ARGV[1], ARGV[4], 'PX', ARGV[2])
redis.call('SET', P .. 'about:' .. ARGV[1], ARGV[3], 'PX', ARGV[2])
for i = 5, #ARGV do
  local serves = P .. 'serves:' .. ARGV[i]
  redis.call('ZREMRANGEBYSCORE', serves, '-inf', int(NOW))
  -- Left there by a clock that was set back since: who lives says so again.
  redis.call('ZREMRANGEBYSCORE', serves, int(NOW + MAX_TTL), '+inf')
  redis.call('ZADD', serves, int(NOW + ARGV[2]), ARGV[1])
  redis.call('PEXPIRE', serves, ARGV[2])
end
return 1
