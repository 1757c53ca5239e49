-- List a tenant's files, or one of them.
-- KEYS[1] prefix
-- ARGV[1] tenant  [2] file id, '' for all
-- Returns names and values (id, expires, bytes, chunks, record: JSON) of complete files that have not expired
-- @include files
local found = {}
local function add(id, file)
  if file and file.ready == '1' and file.expires > NOW then
    found[#found + 1] = described(id, file)
  end
end
if ARGV[2] ~= '' then
  add(ARGV[2], find_file(ARGV[1], ARGV[2]))
else
  local records = redis.call('HGETALL', P .. 'files:' .. ARGV[1])
  for i = 1, #records, 2 do
    add(records[i], read_record(records[i + 1]))
  end
end
return found
