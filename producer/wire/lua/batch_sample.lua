-- The ids of some jobs of a batch.
-- KEYS[1] prefix
-- ARGV[1] batch id  [2] and on: positions in the order of the submits
-- Returns the ids; what was acknowledged or purged is left out
local ids = {}
for i = 2, #ARGV do
  ids[#ids + 1] = redis.call('LRANGE', P .. 'bjobs:' .. ARGV[1], ARGV[i], ARGV[i])[1]
end
return ids
