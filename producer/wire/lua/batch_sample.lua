-- Return the ids of the batch's jobs at the given positions.
-- KEYS[1] prefix
-- ARGV[1] batch id  [2] and on: positions in the order of submission
-- Returns the ids; acknowledged and purged jobs are left out
local ids = {}
for i = 2, #ARGV do
  ids[#ids + 1] = redis.call('LRANGE', P .. 'bjobs:' .. ARGV[1], ARGV[i], ARGV[i])[1]
end
return ids
