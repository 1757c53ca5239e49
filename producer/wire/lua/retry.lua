-- Count an attempt that failed: run the job again later, at its old rank, or bury it.
-- KEYS[1] prefix
-- ARGV[1] id  [2] token  [3] delay in ms  [4] the error, as JSON  [5] the error if it was the last attempt
-- ARGV[6] 1: drop the checkpoint
-- Returns retrying | dead | already_done (this very call came before) | fenced | cancelled | expired
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
local failures = tonumber(job.failures or 0) + 1
if failures >= tonumber(job.max_attempts or 3) then
  finish(id, job, 'dead', ARGV[5])
  return 'dead'
end
detach(id, job)
redis.call('HDEL', P .. 'job:' .. id, 'token')
if ARGV[6] == '1' then
  for i = 0, tonumber(job.n or 1) - 1 do
    redis.call('HDEL', P .. 'job:' .. id, 'len:' .. i)
  end
  redis.call('UNLINK', P .. 'ckpt:' .. id)
  redis.call('HINCRBY', P .. 'job:' .. id, 'epoch', 1)
end
local due = int(NOW + ARGV[3])
redis.call('HSET', P .. 'job:' .. id, 'state', 'delayed', 'failures', failures, 'returned', token, 'due_at', due)
redis.call('SET', P .. 'out:' .. id, ARGV[4])
redis.call('ZADD', P .. 'delayed', due, id)
count(job.batch, 'running', 'delayed')
return 'retrying'
