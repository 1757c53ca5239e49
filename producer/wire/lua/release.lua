-- Hand a running job back: it waits at its old rank, and nothing is counted.
-- KEYS[1] prefix
-- ARGV[1] id  [2] token
-- Returns released | already_done (this very call came before) | fenced | cancelled | expired
-- @include states
local id, token = ARGV[1], ARGV[2]
local job = load(id)
if not job then
  return 'fenced'
end
if job.returned == token or (job.token == token and not ACTIVE[job.state]) then
  return 'already_done'
end
if job.token ~= token or job.state ~= 'running' then
  return 'fenced'
end
if job.ending then
  finish(id, job, job.ending, ENDED[job.ending])
  return job.ending
end
redis.call('HDEL', P .. 'job:' .. id, 'token')
enqueue(id, job)
redis.call('HSET', P .. 'job:' .. id, 'returned', token)
return 'released'
