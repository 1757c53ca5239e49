-- @include common
-- The end of a job: {id, state or '', key, metadata, outcome, checkpoint entries (unless it succeeded)}
local function end_record(id)
  local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'key')
  local entries = {}
  if job[1] ~= 'succeeded' then
    entries = redis.call('LRANGE', P .. 'ckpt:' .. id, 0, -1)
  end
  return {
    id, job[1] or '', job[2] or '', redis.call('GET', P .. 'md:' .. id) or '',
    redis.call('GET', P .. 'out:' .. id) or '', entries
  }
end

local function has_ended(state)
  return state ~= 'queued' and state ~= 'delayed' and state ~= 'running'
end
