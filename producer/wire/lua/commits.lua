-- `commit` for several jobs. What they have in common is written once for all of them, also where one failed.
-- KEYS[1] prefix
-- ARGV per job how many arguments follow, and those of `commit`
-- Returns per job what `commit` does; nothing for the last ones where one failed, or as many ended as one call may end
-- @include committing
-- @include each
together = {counts = {}, gone = {}, ZREM = {}, RPUSH = {}}
local words = each(commit, function() return ends < MAX_ENDS end)
if #together.gone > 0 then
  redis.call('UNLINK', unpack(together.gone))
end
for _, command in ipairs({'ZREM', 'RPUSH'}) do
  for key, values in pairs(together[command]) do
    redis.call(command, key, unpack(values))
  end
end
for key, changes in pairs(together.counts) do
  for state, by in pairs(changes) do
    redis.call('HINCRBY', key, state, by)
  end
end
write_usage()
return words
