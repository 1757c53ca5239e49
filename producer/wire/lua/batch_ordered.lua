-- Return the outcomes of a batch's jobs in the order of submission, up to the first job that has not ended.
-- KEYS[1] prefix
-- ARGV[1] batch id  [2] position to read from  [3] maximum number of jobs  [4] bytes after which to stop
-- Returns {next position, {position, end as `end_record` returns it} and so on}; acknowledged jobs are left out
-- @include records
local position = tonumber(ARGV[2])
local items, bytes = {}, 0
for _, id in ipairs(redis.call('LRANGE', P .. 'bjobs:' .. ARGV[1], position, position + ARGV[3] - 1)) do
  local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'acked')
  local state = not job[2] and job[1]
  if bytes > tonumber(ARGV[4]) or (state and not has_ended(state)) then
    break
  end
  position = position + 1
  if state then
    local record, size = end_record(id)
    items[#items + 1] = {position, record}
    bytes = bytes + size
  end
end
return {position, items}
