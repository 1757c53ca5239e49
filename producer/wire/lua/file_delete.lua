-- Delete a file, unless an open batch needs it.
-- KEYS[1] prefix
-- ARGV[1] tenant  [2] file id
-- Returns deleted | missing | in_use
-- @include files
local file = find_file(ARGV[1], ARGV[2])
if not file then
  return 'missing'
elseif tonumber(redis.call('HGET', P .. 'fileuses', ARGV[2]) or 0) > 0 then
  return 'in_use'
end
for n = 0, file.chunks - 1 do
  redis.call('UNLINK', P .. 'file:' .. ARGV[2] .. ':' .. n)
end
redis.call('HDEL', P .. 'files:' .. ARGV[1], ARGV[2])
return 'deleted'
