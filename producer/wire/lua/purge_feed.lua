-- Empty the places of removed jobs in the order in which a batch's jobs ended.
-- KEYS[1] prefix
-- ARGV[1] batch id  [2] place in the list to start from  [3] number to read
-- Returns the number read
local key, from = P .. 'bfeed:' .. ARGV[1], tonumber(ARGV[2])
local ids = redis.call('LRANGE', key, from, from + ARGV[3] - 1)
for i, id in ipairs(ids) do
  if id ~= '' and redis.call('EXISTS', P .. 'job:' .. id) == 0
    and redis.call('SISMEMBER', P .. 'backed:' .. ARGV[1], id) == 0 then
    redis.call('LSET', key, from + i - 1, '')
  end
end
return #ids
