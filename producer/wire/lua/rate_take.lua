-- Take tokens from a bucket that fills at a steady rate, all or nothing. It limits the request rate of an API key.
-- KEYS[1] prefix
-- ARGV[1] the bucket's name  [2] number per second  [3] capacity  [4] number to take
--   [5] number that an earlier call took, to be returned first
-- Returns {1 if taken or 0, number left, ms until that number is available}
local rate, burst, count = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local key = P .. 'rate:' .. ARGV[1]
local found = redis.call('HMGET', key, 'level', 'at')
local level = (found[1] or burst) + math.max(0, NOW - (found[2] or NOW)) * rate / 1000
level = math.min(burst, level + ARGV[5])
local taken = level >= count and 1 or 0
level = level - taken * count
redis.call('HSET', key, 'level', string.format('%.6f', level), 'at', int(NOW))
redis.call('PEXPIRE', key, int(math.min(1e10, math.ceil((burst - level) / rate * 1000) + 1000)))
local wait = level >= count and 0 or math.ceil((count - level) / rate * 1000)
return {taken, math.floor(level), math.min(1e10, wait)}
