-- End running jobs: result, state, counters, feed, hint and lease in one step.
-- KEYS[1] prefix
-- ARGV[1] id  [2] token  [3] terminal state  [4] the result (succeeded) or the error (any other), as JSON
-- ARGV[5] the last progress, as in checkpoint.lua, or '': what a status says then agrees with the result
-- ARGV[6] the URI of the result, if ARGV[4] is its stub; else ''
-- ARGV[7] what the ledger counts: `<prompt tokens> <of them cached> <generated tokens> <ms of the device>`, or ''
-- ARGV[8] and on: the same seven of further jobs
-- Returns committed | already_done (this very commit came before) | fenced (nothing written)
--   | cancelled | expired (that end had been asked for, and came first); of several jobs a word each, apart by spaces,
--   and none for the last ones where this call has ended as many as one may: they are to be sent again
-- @include fenced
-- @include keeping
local WIDTH = 7

local function commit(at)
  take_up(at)
  local state, outcome, progress, stored, used = unpack(ARGV, at + 2, at + WIDTH - 1)
  local word = refusal() or ended_by_request(state, used)
  if word then
    return word
  end
  if progress ~= '' then
    job.progress, job.progress_at = progress, int(NOW)
  end
  if (stored or '') ~= '' then
    redis.call('ZREM', P .. 'stored', stored)
    job.stored_result = stored
  end
  job.used = used
  finish(id, job, state, outcome)
  if job.promise and state == 'succeeded' then
    note_kept(job)
  end
  return 'committed'
end

if #ARGV <= WIDTH then
  return commit(1)
end
counting = {}
local words = {}
local is_well, problem = pcall(function()
  for at = 1, #ARGV, WIDTH do
    if ends < MAX_ENDS then
      words[#words + 1] = commit(at)
    end
  end
end)
-- Also where one of them failed: the others' ends stand.
write_usage()
for key, changes in pairs(counting) do
  for state, by in pairs(changes) do
    redis.call('HINCRBY', key, state, by)
  end
end
return is_well and table.concat(words, ' ') or error(problem, 0)
