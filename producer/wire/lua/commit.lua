-- End a running job: result, state, counters, feed, hint and lease in one step.
-- KEYS[1] prefix
-- ARGV[1] id  [2] token  [3] terminal state  [4] the result (succeeded) or the error (any other), as JSON
-- Returns committed | already_done (this very commit came before) | fenced (nothing written)
--   | cancelled | expired (that end had been asked for, and came first)
-- @include states
local id, token, state = ARGV[1], ARGV[2], ARGV[3]
local job = load(id)
if not job or job.token ~= token then
  return 'fenced'
end
if job.state ~= 'running' then
  return (ACTIVE[job.state] and 'fenced') or 'already_done'
end
if job.ending and job.ending ~= state then
  finish(id, job, job.ending, ENDED[job.ending])
  return job.ending
end
finish(id, job, state, ARGV[4])
return 'committed'
