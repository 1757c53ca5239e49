-- `commit` for several jobs. Counts and the ledger are written once for all of them, also where one failed.
-- KEYS[1] prefix
-- ARGV per job how many arguments follow, and those of `commit`
-- Returns per job what `commit` does; nothing for the last ones where one failed, or as many ended as one call may end
-- @include committing
-- @include each
counting = {}
local words = each(commit, function() return ends < MAX_ENDS end)
write_usage()
for key, changes in pairs(counting) do
  for state, by in pairs(changes) do
    redis.call('HINCRBY', key, state, by)
  end
end
return words
