-- A file's record is `<expires, unix ms> <bytes> <chunks> <1 ready or 0> <JSON>` in the hash of its tenant's files.

local function read_record(record)
  local expires, bytes, chunks, ready, text = string.match(record or '', '^(%d+) (%d+) (%d+) ([01]) (.*)$')
  if not expires then
    return nil
  end
  return {expires = tonumber(expires), bytes = tonumber(bytes), chunks = tonumber(chunks), ready = ready, text = text}
end

local function write_record(tenant, id, file)
  local numbers = {int(file.expires), int(file.bytes), int(file.chunks), file.ready}
  redis.call('HSET', P .. 'files:' .. tenant, id, table.concat(numbers, ' ') .. ' ' .. file.text)
end

-- The file, if it is whole and has not expired.
local function find_file(tenant, id)
  local file = read_record(redis.call('HGET', P .. 'files:' .. tenant, id))
  if file and file.ready == '1' and file.expires > NOW then
    return file
  end
end

-- A file as scripts return it, in names and values.
local function described(id, file)
  return {
    'id', id, 'expires', int(file.expires), 'bytes', file.bytes, 'chunks', file.chunks, 'record', file.text
  }
end

-- Let a file live until `expires` at least; the record's own time is always the chunks' time.
local function keep_until(tenant, id, file, expires)
  file.expires = expires
  for n = 0, file.chunks - 1 do
    redis.call('PEXPIRE', P .. 'file:' .. id .. ':' .. n, int(expires - NOW))
  end
  write_record(tenant, id, file)
end
