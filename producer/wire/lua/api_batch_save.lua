-- Store the holder's update of a batch: its progress, its end, or its release by the holder.
-- KEYS[1] prefix
-- ARGV[1] id  [2] the token of the claim  [3] ms of the lease from now on; 0: release; -1: the batch has ended
-- ARGV[4] and on: names and values. A batch that is being cancelled keeps that status until it has ended: until it
--   has an `event`, of which its webhooks are notified, or its lease ends.
-- Returns the status, or '' if another gateway holds the batch or it has ended
local id, lease = ARGV[1], tonumber(ARGV[3])
local key = P .. 'abatch:' .. id
local found = redis.call('HMGET', key, 'token', 'status', 'tenant', 'file')
if found[1] ~= ARGV[2] or redis.call('ZRANK', P .. 'ableases', id) == false then
  return ''
end
local status, has_ended = found[2], lease == -1
for i = 4, #ARGV, 2 do
  has_ended = has_ended or ARGV[i] == 'event'
end
for i = 4, #ARGV, 2 do
  local name, value = ARGV[i], ARGV[i + 1]
  if name ~= 'status' then
    redis.call('HSET', key, name, value)
  elseif has_ended or status ~= 'cancelling' then
    status = value
    redis.call('HSET', key, 'status', value)
  end
end
if lease ~= -1 then
  redis.call('ZADD', P .. 'ableases', lease == 0 and 0 or int(NOW + lease), id)
  return status
end
redis.call('ZREM', P .. 'ableases', id)
for name, field in pairs({abopen = found[3], fileuses = found[4]}) do
  if redis.call('HINCRBY', P .. name, field, -1) <= 0 then
    redis.call('HDEL', P .. name, field)
  end
end
return status
