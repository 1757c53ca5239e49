-- End a running job: result, state, counters, feed, hint and lease in one step.
-- KEYS[1] prefix
-- ARGV[1] id  [2] token  [3] terminal state  [4] the result (succeeded) or the error (any other), as JSON
-- ARGV[5] the last progress, as in checkpoint.lua, or '': what a status says then agrees with the result
-- ARGV[6] the URI of the result, if ARGV[4] is its stub; else ''
-- ARGV[7] what the ledger counts: `<prompt tokens> <of them cached> <generated tokens> <ms of the device>`, or ''
-- Returns committed | already_done (this very commit came before) | fenced (nothing written)
--   | cancelled | expired (that end had been asked for, and came first)
-- @include fenced
-- @include keeping
local word = refusal() or ended_by_request(ARGV[3], ARGV[7])
if word then
  return word
end
if ARGV[5] ~= '' then
  job.progress, job.progress_at = ARGV[5], int(NOW)
end
if (ARGV[6] or '') ~= '' then
  redis.call('ZREM', P .. 'stored', ARGV[6])
  job.stored_result = ARGV[6]
end
job.used = ARGV[7]
finish(id, job, ARGV[3], ARGV[4])
if job.promise and ARGV[3] == 'succeeded' then
  note_kept(job)
end
return 'committed'
