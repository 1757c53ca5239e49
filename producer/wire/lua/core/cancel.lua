-- Cancel waiting jobs, and request the cancellation of running ones.
-- KEYS[1] prefix
-- ARGV job ids
-- Returns one of cancelled | requested | done | missing per id
-- @include core/cancelling
local replies = {}
-- In reverse order: duplicates before their primary job, so that none is promoted only to be cancelled next.
for i = #ARGV, 1, -1 do
  replies[i] = cancel(ARGV[i])
end
return replies
