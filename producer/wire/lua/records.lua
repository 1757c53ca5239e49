-- The result or the last error of a job; `shared` is its field of that name.
local function outcome_of(id, shared)
  return redis.call('GET', P .. (shared and 'end:' .. shared or 'out:' .. id)) or ''
end

-- Alternating names and values of those that exist.
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

local END_NAMES = {'id', 'state', 'key', 'leader', 'at', 'finished_at', 'superseded_at', 'metadata', 'outcome', 'entries'}

-- The end of a job as names and values, and its size in bytes. `leader`: the id whose end it shares. `entries`: those
-- of its checkpoint, unless it succeeded. `superseded_at`: when another result replaced the first.
local function end_record(id)
  local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'key', 'leader', 'at', 'finished_at', 'superseded_at',
    'shared', 'saved')
  local entries, bytes = false, 0
  if job[1] ~= 'succeeded' then
    entries, bytes = redis.call('LRANGE', P .. 'ckpt:' .. id, 0, -1), tonumber(job[8] or 0)
  end
  local outcome = outcome_of(id, job[7])
  local values = {id, job[1], job[2], job[3], job[4], job[5], job[6], redis.call('GET', P .. 'md:' .. id), outcome, entries}
  return named(END_NAMES, values), bytes + #outcome, job[1]
end

local function has_ended(state)
  return state ~= 'queued' and state ~= 'delayed' and state ~= 'running'
end
