-- Return the outcomes of a batch's jobs in the order in which they ended.
-- KEYS[1] prefix
-- ARGV[1] batch id  [2] position to read from  [3] maximum number of jobs  [4] bytes after which to stop
-- Returns {next position, {position, end as `end_record` returns it} and so on}; acknowledged jobs are left out
-- @include records
local base = tonumber(redis.call('HGET', P .. 'batch:' .. ARGV[1], 'base') or 0)
local position = math.max(base, tonumber(ARGV[2]))
local from = position - base
local items, bytes = {}, 0
for _, id in ipairs(redis.call('LRANGE', P .. 'bfeed:' .. ARGV[1], from, from + ARGV[3] - 1)) do
  if bytes > tonumber(ARGV[4]) then
    break
  end
  position = position + 1
  local record, size, state = end_record(id)
  if state then
    items[#items + 1] = {position, record}
    bytes = bytes + size
  end
end
return {position, items}
