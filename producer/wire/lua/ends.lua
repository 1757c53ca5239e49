-- Return which of these jobs have ended. Waiting clients poll with it.
-- KEYS[1] prefix
-- ARGV job ids
-- Returns 1 (ended, or no such job) or 0 per id
local replies = {}
for i, id in ipairs(ARGV) do
  local state = redis.call('HGET', P .. 'job:' .. id, 'state')
  replies[i] = (state == 'queued' or state == 'delayed' or state == 'running') and 0 or 1
end
return replies
