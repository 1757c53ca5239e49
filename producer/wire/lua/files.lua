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

-- Return the file if it is complete and has not expired.
local function find_file(tenant, id)
  local file = read_record(redis.call('HGET', P .. 'files:' .. tenant, id))
  if file and file.ready == '1' and file.expires > NOW then
    return file
  end
end

-- A file's names and values, as scripts return them.
local function described(id, file)
  return {
    'id', id, 'expires', int(file.expires), 'bytes', file.bytes, 'chunks', file.chunks, 'record', file.text
  }
end

-- Keep a file until `expires` at least. The record and its chunks always expire together.
local function keep_until(tenant, id, file, expires)
  file.expires = expires
  for n = 0, file.chunks - 1 do
    redis.call('PEXPIRE', P .. 'file:' .. id .. ':' .. n, int(expires - NOW))
  end
  write_record(tenant, id, file)
end
