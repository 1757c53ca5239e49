-- Outputs that a job received from its parents, appended to its envelope: each follows a byte that JSON does not
-- contain. `names` is the job's field `given`.
local SEPARATOR = '\30'
local outputs = {}
local function outputs_of(names)
  local parts = {}
  for name in string.gmatch(names or '', '%S+') do
    outputs[name] = outputs[name] or redis.call('GET', P .. 'end:' .. name) or ''
    parts[#parts + 1] = SEPARATOR .. outputs[name]
  end
  return table.concat(parts)
end

-- The payload of a job with its received outputs, or ''.
local function payload_of(id)
  local payload = redis.call('GET', P .. 'in:' .. id)
  return payload and payload .. outputs_of(redis.call('HGET', P .. 'job:' .. id, 'given')) or ''
end
