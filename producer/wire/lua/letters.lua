-- @include records
local NAMES = {'id', 'died_at', 'lane', 'created_at', 'attempts', 'crashes', 'batch', 'key', 'replayed_as', 'metadata', 'error'}

-- A dead letter, as alternating names and values; false for a job that is not dead.
local function letter(id)
  local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'finished_at', 'lane', 'at', 'failures', 'crashes',
    'batch', 'key', 'replayed_as', 'shared', 'acked')
  if job[1] ~= 'dead' or job[11] then
    return false
  end
  job[1] = id
  job[11] = outcome_of(id, job[10])
  job[10] = redis.call('GET', P .. 'md:' .. id)
  return named(NAMES, job)
end
