-- Count a failed attempt: run the job again later, at its earlier rank, or make it a dead letter.
-- KEYS[1] prefix
-- ARGV[1] id  [2] token  [3] delay in ms  [4] the error, as JSON  [5] the error if it was the last attempt
-- ARGV[6] 1: drop the checkpoint  [7] as in commit.lua, counted if it was the last attempt
-- ARGV[8] optional, its time per phase, as in commit.lua
-- Returns retrying | dead | already_done (this call arrived before) | fenced | cancelled | expired
-- @include core/states
-- @include core/fenced
take_up(ARGV, 8)
local word = refusal(true) or ended_by_request(nil, ARGV[7])
if word then
  return word
end
local failures = tonumber(job.failures or 0) + 1
if failures >= tonumber(job.max_attempts or 3) then
  job.used = ARGV[7]
  finish(id, job, 'dead', ARGV[5])
  redis.call('HSET', P .. 'job:' .. id, 'failures', failures)
  return 'dead'
end
detach(id, job)
redis.call('HDEL', P .. 'job:' .. id, 'token')
if ARGV[6] == '1' then
  drop_checkpoint()
end
local _, error = pcall(cjson.decode, ARGV[4])
if type(error) ~= 'table' then
  error = {}
end
remember(id, job, 'retried', error.code, error.message)
local due = int(NOW + ARGV[3])
redis.call('HSET', P .. 'job:' .. id, 'state', 'delayed', 'failures', failures, 'returned', token, 'due_at', due)
redis.call('SET', P .. 'out:' .. id, ARGV[4])
redis.call('ZADD', P .. 'delayed', due, id)
redis.call('ZADD', P .. 'retrying', due, id)
count(job.batch, 'running', 'delayed')
return 'retrying'
