-- Request the cancellation of a batch. Its holder carries it out.
-- KEYS[1] prefix
-- ARGV[1] tenant  [2] batch id
-- Returns its values {name, value...}, or nothing if the tenant does not have such a batch
local key = P .. 'abatch:' .. ARGV[2]
local found = redis.call('HMGET', key, 'tenant', 'status')
if found[1] ~= ARGV[1] then
  return {}
end
if found[2] == 'validating' or found[2] == 'in_progress' then
  redis.call('HSET', key, 'status', 'cancelling', 'cancelling_at', int(NOW / 1000))
end
return redis.call('HGETALL', key)
