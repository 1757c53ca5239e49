-- End waiting jobs, ask for the end of running ones.
-- KEYS[1] prefix
-- ARGV job ids
-- Returns one of cancelled | requested | done | missing per id
-- @include core/cancelling
local replies = {}
-- The last first: followers before their leader, so that none is made to lead only to be cancelled next.
for i = #ARGV, 1, -1 do
  replies[i] = cancel(ARGV[i])
end
return replies
