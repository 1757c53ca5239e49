-- Take from a bucket that fills at a steady rate, all or nothing: how often a holder of an API key may ask.
-- KEYS[1] prefix
-- ARGV[1] the bucket's name  [2] how many a second  [3] how many it holds  [4] how many to take
--   [5] how many an earlier take took, and are put back first
-- Returns {1 taken or 0, how many are left, in how many ms there are so many again}
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
