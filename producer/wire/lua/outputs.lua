-- What a job was given by those it waited for, as it stands behind its envelope: each output behind a byte that JSON has
-- not. `names` is the job's field `given`.
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

-- The payload of a job with what it was given, or ''.
local function payload_of(id)
  local payload = redis.call('GET', P .. 'in:' .. id)
  return payload and payload .. outputs_of(redis.call('HGET', P .. 'job:' .. id, 'given')) or ''
end
