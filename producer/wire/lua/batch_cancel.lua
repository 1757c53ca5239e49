-- Cancel a slice of a batch.
-- KEYS[1] prefix
-- ARGV[1] batch id  [2] position to start from  [3] maximum number of jobs
-- Returns {jobs cancelled or asked to stop, jobs read: fewer if many duplicates share their results}
-- @include core/cancelling
local ids = redis.call('LRANGE', P .. 'bjobs:' .. ARGV[1], ARGV[2], ARGV[2] + ARGV[3] - 1)
local stopped, followers, last = 0, 0, 0
while last < #ids and followers < 2048 do
  last = last + 1
  followers = followers + redis.call('ZCARD', P .. 'followers:' .. ids[last])
end
-- In reverse order: duplicates before their primary job, so that none is promoted only to be cancelled next.
for i = last, 1, -1 do
  local became = cancel(ids[i])
  if became == 'cancelled' or became == 'requested' then
    stopped = stopped + 1
  end
end
return {stopped, last}
