-- Return the live workers.
-- KEYS[1] prefix
-- Returns each worker's description, as JSON
local replies = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'workers', int(NOW), '+inf')) do
  replies[#replies + 1] = redis.call('GET', P .. 'worker:' .. id) or nil
end
return replies
