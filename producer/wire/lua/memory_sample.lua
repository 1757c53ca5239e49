-- Sample the server's memory by kind of data: bytes of keys that are chosen at random.
-- KEYS[1] prefix
-- ARGV[1] number of keys, up to 64
-- Returns bytes of payloads that wait or run, results, checkpoints, dead letters, files, records (of jobs and batches,
--   and the queue's order), and data outside this queue. Checkpoints include streamed tokens.
local PLACES = {['in'] = 1, md = 1, out = 2, ['end'] = 2, output = 2, ckpt = 3, file = 5, files = 5}
local OF_JOBS = {['in'] = true, md = true, out = true, ckpt = true, job = true, history = true}
local bytes = {0, 0, 0, 0, 0, 0, 0}

local function place_of(name)
  if string.sub(name, 1, #P) ~= P then
    return 7
  end
  local word, id = string.match(string.sub(name, #P + 1), '^(%w+):?(.*)$')
  if OF_JOBS[word] and redis.call('HGET', P .. 'job:' .. id, 'state') == 'dead' then
    return 4
  end
  return PLACES[word] or 6
end

for _ = 1, math.min(64, tonumber(ARGV[1])) do
  local name = redis.call('RANDOMKEY')
  -- Another queue's key may be inaccessible.
  local size = name and redis.pcall('MEMORY', 'USAGE', name)
  if type(size) == 'number' then
    local place = place_of(name)
    bytes[place] = bytes[place] + size
  end
end
return bytes
