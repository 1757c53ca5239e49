-- Remove one file of a tenant, and some of its batches of the HTTP interface, even if they are in use.
-- KEYS[1] prefix
-- ARGV[1] tenant
-- Returns {ids of the batches, id of the file}: repeat until both are empty
-- @include files
local tenant = ARGV[1]
local index, key = P .. 'abatches:' .. tenant, P .. 'files:' .. tenant
local batches = redis.call('ZRANGE', index, 0, 63)
for _, id in ipairs(batches) do
  redis.call('ZREM', index, id)
  redis.call('ZREM', P .. 'ableases', id)
  redis.call('UNLINK', P .. 'abatch:' .. id)
end
local cursor = '0'
local found = {}
repeat
  local page = redis.call('HSCAN', key, cursor, 'COUNT', 1)
  cursor, found = page[1], page[2]
until #found > 0 or cursor == '0'
local file = read_record(found[2])
for n = 0, (file and file.chunks or 0) - 1 do
  redis.call('UNLINK', P .. 'file:' .. found[1] .. ':' .. n)
end
if #found > 0 then
  redis.call('HDEL', key, found[1])
  redis.call('HDEL', P .. 'fileuses', found[1])
end
if #batches == 0 and #found == 0 then
  redis.call('HDEL', P .. 'abopen', tenant)
end
return {batches, found[1] or ''}
