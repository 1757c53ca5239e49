-- Who lives.
-- KEYS[1] prefix
-- Returns what each worker says about itself, as JSON
-- @include common
local replies = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'workers', int(NOW), '+inf')) do
  -- Workers of the first release say all there is in the one that they have.
  local info = redis.call('GET', P .. 'about:' .. id) or redis.call('GET', P .. 'worker:' .. id)
  if info then
    replies[#replies + 1] = info
  end
end
return replies
