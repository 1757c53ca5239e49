-- Take one from a bucket that fills at a steady rate: how often a holder of an API key may ask.
-- KEYS[1] prefix
-- ARGV[1] the bucket's name  [2] how many a second  [3] how many it holds
-- Returns {1 taken or 0, how many are left, in how many ms there is one again}
-- @include common
local rate, burst = tonumber(ARGV[2]), tonumber(ARGV[3])
local key = P .. 'rate:' .. ARGV[1]
local found = redis.call('HMGET', key, 'level', 'at')
local level = math.min(burst, (found[1] or burst) + math.max(0, NOW - (found[2] or NOW)) * rate / 1000)
local taken = level >= 1 and 1 or 0
level = level - taken
redis.call('HSET', key, 'level', string.format('%.6f', level), 'at', int(NOW))
redis.call('PEXPIRE', key, int(math.min(1e10, math.ceil((burst - level) / rate * 1000) + 1000)))
local wait = level >= 1 and 0 or math.ceil((1 - level) / rate * 1000)
return {taken, math.floor(level), math.min(1e10, wait)}
