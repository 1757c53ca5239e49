-- Cancel a slice of a batch.
-- KEYS[1] prefix
-- ARGV[1] batch id  [2] position to start from  [3] jobs at most
-- Returns {jobs cancelled or asked to stop, jobs looked at}
-- @include cancelling
local ids = redis.call('LRANGE', P .. 'bjobs:' .. ARGV[1], ARGV[2], ARGV[2] + ARGV[3] - 1)
local stopped = 0
-- The last first: followers before their leader, so that none is made to lead only to be cancelled next.
for i = #ids, 1, -1 do
  local became = cancel(ids[i])
  if became == 'cancelled' or became == 'requested' then
    stopped = stopped + 1
  end
end
return {stopped, #ids}
