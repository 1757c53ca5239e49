-- Replace a result of an accused worker by that of a copy, or leave it, and remove the job from the worker's list. Jobs
-- are settled in the order of the list, so a repeated call changes nothing.
-- KEYS[1] prefix
-- ARGV[1] worker  [2] the first id of its list  [3] the copy's id, or '' to leave the result  [4] the copy's result, to
--   store
-- Returns superseded | left | gone (the job has no result any more) | already_done (it is not the first)
-- @include core/states
-- @include trails
local worker, id, copy = ARGV[1], ARGV[2], ARGV[3]
local key = P .. 'did:' .. worker
local entry = redis.call('LRANGE', key, 0, 0)[1]
local first, bytes = trails.read(entry or '- ')
if first ~= id then
  return 'already_done'
end
redis.call('LTRIM', key, 1, -1)
redis.call('HINCRBY', P .. 'audit:' .. worker, 'base', 1)
redis.call('HINCRBY', P .. 'audit:' .. worker, 'held', int(0 - (bytes or 0)))
local job = load(id)
if not job or job.state ~= 'succeeded' or job.acked or copy == '' then
  if bytes then
    redis.call('UNLINK', P .. 'in:' .. id)
  end
  return job and copy == '' and 'left' or 'gone'
end

local ttl = redis.call('PTTL', P .. 'job:' .. id)
if job.shared then
  if job.batch then -- the records of other jobs expire automatically
    let_go_of_end(job.shared)
  end
  redis.call('HDEL', P .. 'job:' .. id, 'shared', 'leader')
end
drop_stored(NOW, job.stored_result)
redis.call('HDEL', P .. 'job:' .. id, 'stored_result', 'notified', 'notice', 'relayed')
redis.call('SET', P .. 'out:' .. id, ARGV[4])
if ttl > 0 then
  redis.call('PEXPIRE', P .. 'out:' .. id, ttl)
end
redis.call('HSET', P .. 'job:' .. id, 'superseded_at', NOW_TEXT)
if job.batch then
  redis.call('RPUSH', P .. 'bfeed:' .. job.batch, id)
  redis.call('PUBLISH', P .. 'ended', 'batch:' .. job.batch)
end
if job.webhook then
  redis.call('ZADD', P .. 'outbox', NOW_TEXT, id)
end
if job.relay then
  redis.call('ZADD', P .. 'outbox:' .. job.relay, NOW_TEXT, id)
end
-- From now on it is the result of the copy's worker, which may also turn out to be wrong.
local next_worker = redis.call('HGET', P .. 'job:' .. copy, 'worker')
if next_worker and redis.call('EXISTS', P .. 'did:' .. next_worker) == 1 then
  redis.call('RPUSH', P .. 'did:' .. next_worker, entry)
  redis.call('HINCRBY', P .. 'audit:' .. next_worker, 'held', int(bytes or 0))
elseif bytes then
  redis.call('UNLINK', P .. 'in:' .. id)
end
return 'superseded'
