-- Mark a file as complete and readable.
-- KEYS[1] prefix
-- ARGV[1] tenant  [2] file id  [3] ms to keep it
-- Returns its names and values as `file_list`, or nothing if the upload took too long or the file was deleted meanwhile
-- @include files
local file = read_record(redis.call('HGET', P .. 'files:' .. ARGV[1], ARGV[2]))
if not file or file.expires <= NOW then
  return {}
end
for n = 0, file.chunks - 1 do
  if redis.call('EXISTS', P .. 'file:' .. ARGV[2] .. ':' .. n) == 0 then
    return {}
  end
end
file.ready = '1'
keep_until(ARGV[1], ARGV[2], file, NOW + ARGV[3])
return described(ARGV[2], file)
