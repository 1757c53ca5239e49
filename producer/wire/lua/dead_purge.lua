-- Delete dead letters. The end of a batch's job stays readable until the batch expires or is acknowledged.
-- KEYS[1] prefix
-- ARGV job ids
-- Returns the number of letters deleted
-- @include core/states
local purged = 0
for _, id in ipairs(ARGV) do
  local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'batch', 'stored', 'given')
  if redis.call('ZREM', P .. 'dead', id) == 1 and job[1] == 'dead' then
    purged = purged + 1
    if job[2] then
      redis.call('UNLINK', P .. 'in:' .. id)
      redis.call('HDEL', P .. 'job:' .. id, 'given')
      drop_stored(NOW, job[3])
      let_go_of_outputs({given = job[4]})
    else
      forget(id)
    end
  end
end
return purged
