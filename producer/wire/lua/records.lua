-- @include common
-- The end of a job: {id, state or '', key, metadata, outcome, the id it copied its end from or '', created_at,
-- finished_at, checkpoint entries (unless it succeeded)}
local function end_record(id)
  local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'key', 'leader', 'at', 'finished_at')
  local entries = {}
  if job[1] ~= 'succeeded' then
    entries = redis.call('LRANGE', P .. 'ckpt:' .. id, 0, -1)
  end
  return {
    id, job[1] or '', job[2] or '', redis.call('GET', P .. 'md:' .. id) or '',
    redis.call('GET', P .. 'out:' .. id) or '', job[3] or '', job[4] or '', job[5] or '', entries
  }
end

local function has_ended(state)
  return state ~= 'queued' and state ~= 'delayed' and state ~= 'running'
end
