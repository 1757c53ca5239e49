-- Reserve space for a file of a tenant. An unfinished file is deleted later. A repeated call may enlarge it.
-- KEYS[1] prefix
-- ARGV[1] tenant  [2] file id  [3] bytes  [4] chunks  [5] JSON that describes it  [6] ms for the upload
--   [7] files and [8] bytes that the tenant may have, including this one  [9] 1: may be rejected if memory runs out
--   [10] 1: the parts written so far can be read
-- Returns 1; 0: the tenant's limit is reached, or its data is being removed; -1: the server has no free memory
-- @include core/room
-- @include files
-- @include core/purged
local tenant, id = ARGV[1], ARGV[2]
local key = P .. 'files:' .. tenant
local records = redis.call('HGETALL', key)
local count, bytes, before = 1, tonumber(ARGV[3]), 0
for i = 1, #records, 2 do
  local file = read_record(records[i + 1])
  if not file or file.expires <= NOW then
    redis.call('HDEL', key, records[i])
  elseif records[i] ~= id then
    count, bytes = count + 1, bytes + file.bytes
  else
    before = file.bytes
  end
end
if is_purged(tenant) or count > tonumber(ARGV[7]) or bytes > tonumber(ARGV[8]) then
  return 0
end
local memory = memory_room()
if ARGV[9] == '1' and memory and memory < tonumber(ARGV[3]) then
  book_memory(0, 1)
  return -1
end
if memory then
  book_memory(math.max(0, ARGV[3] - before), 0)
end
write_record(tenant, id, {
  expires = NOW + ARGV[6], bytes = tonumber(ARGV[3]), chunks = tonumber(ARGV[4]), ready = ARGV[10], text = ARGV[5]
})
redis.call('PEXPIRE', key, 34560000000)
return 1
