-- End waiting jobs, ask for the end of running ones.
-- KEYS[1] prefix
-- ARGV job ids
-- Returns one of cancelled | requested | done | missing per id
-- @include cancelling
local replies = {}
for i, id in ipairs(ARGV) do
  replies[i] = cancel(id)
end
return replies
