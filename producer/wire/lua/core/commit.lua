-- Finish running jobs: the result, state, counters, feed, hint and lease of each in one step. Values common to several
-- jobs are written once for all of them, even if one job failed.
-- KEYS[1] prefix
-- ARGV per job the number of arguments that follow, and [1] id  [2] token  [3] terminal state
--   [4] the result (succeeded) or the error (any other), as JSON
--   [5] the last progress, as in checkpoint.lua, or '': the status then matches the result
--   [6] the URI of the result, if [4] is its stub; else ''
--   [7] usage of the execution: `<prompt tokens> <of them cached> <generated tokens> <ms of the device>`, or ''
--   [8] optional, its time per phase: alternating letters and numbers, up to 64 bytes
-- Returns per job committed | already_done (this commit arrived before) | fenced (nothing written) | cancelled |
--   expired (requested before the commit); nothing for the last jobs if one failed, or the call reached its limit of
--   jobs to finish
-- @include core/hooks
-- @include core/states
-- @include core/fenced
-- @include core/each
local function commit(args)
  take_up(args, 8)
  local state, stored = args[3], args[6]
  local word = refusal() or ended_by_request(state, args[7])
  if word then
    return word
  end
  if args[5] ~= '' then
    job.progress, job.progress_at = args[5], NOW_TEXT
  end
  if (stored or '') ~= '' then
    redis.call('ZREM', P .. 'stored', stored)
    job.stored_result = stored
  end
  job.used = args[7]
  finish(id, job, state, args[4])
  return 'committed'
end

if not is_alone then
  together = {counts = {}, gone = {}, ZREM = {}, RPUSH = {}}
end
local words = each(commit, function() return ends < MAX_ENDS end)
if is_alone then
  return words
end
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
call_all(on_flush)
return words
