-- The result or the last error of a job; `shared` is its field of that name.
local function outcome_of(id, shared)
  return redis.call('GET', P .. (shared and 'end:' .. shared or 'out:' .. id)) or ''
end

-- Names and values in turn, of what there is.
local function named(names, values)
  local reply = {}
  for i, name in ipairs(names) do
    if values[i] then
      reply[#reply + 1] = name
      reply[#reply + 1] = values[i]
    end
  end
  return reply
end

-- The end of a job: {id, state or '', key, metadata, outcome, the id whose end it shares or '', created_at, finished_at,
-- checkpoint entries (unless it succeeded), when another result replaced the first or ''}; and the bytes of it
local function end_record(id)
  local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'key', 'leader', 'at', 'finished_at', 'shared', 'saved',
    'superseded_at')
  local entries, bytes = {}, 0
  if job[1] ~= 'succeeded' then
    entries, bytes = redis.call('LRANGE', P .. 'ckpt:' .. id, 0, -1), tonumber(job[7] or 0)
  end
  local outcome = outcome_of(id, job[6])
  return {
    id, job[1] or '', job[2] or '', redis.call('GET', P .. 'md:' .. id) or '', outcome, job[3] or '', job[4] or '',
    job[5] or '', entries, job[8] or ''
  }, bytes + #outcome
end

local function has_ended(state)
  return state ~= 'queued' and state ~= 'delayed' and state ~= 'running'
end
