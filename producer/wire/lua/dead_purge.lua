-- Forget dead letters. Of a batch's job the end stays readable until the batch expires or is acknowledged.
-- KEYS[1] prefix
-- ARGV job ids
-- Returns how many there were
-- @include states
local purged = 0
for _, id in ipairs(ARGV) do
  local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'batch')
  if redis.call('ZREM', P .. 'dead', id) == 1 and job[1] == 'dead' then
    purged = purged + 1
    if job[2] then
      redis.call('UNLINK', P .. 'in:' .. id)
      drop_stored(NOW, redis.call('HGET', P .. 'job:' .. id, 'stored'))
    else
      forget(id)
    end
  end
end
return purged
