-- @include common
-- Moving jobs between states. Callers check first, then call these, which only write and begin with a
-- removal: after a script's first write a server at maxmemory lets the rest of it through.
local DAY = 86400000
local BATCH_TTL = 7 * DAY
local DEAD_TTL = 14 * DAY
local HISTORY = 32
local CANCELLED = '{"code":"cancelled","message":"the job was cancelled","retryable":false}'
local EXPIRED = '{"code":"deadline_exceeded","message":"the deadline passed","retryable":false}'
local CRASHED = '{"code":"crash_suspect","message":"5 workers died while they ran this job","retryable":false}'
local LOST_PAYLOAD = '{"code":"invalid_job","message":"the payload is gone from the server","retryable":false}'
local ENDED = {cancelled = CANCELLED, expired = EXPIRED}
local ACTIVE = {queued = true, delayed = true, running = true}

-- The job's hash as a table, or nil.
local function load(id)
  local flat = redis.call('HGETALL', P .. 'job:' .. id)
  if #flat == 0 then
    return nil
  end
  local job = {}
  for i = 1, #flat, 2 do
    job[flat[i]] = flat[i + 1]
  end
  return job
end

local function count(batch, from, to)
  redis.call('HINCRBY', P .. 'counts', from, -1)
  redis.call('HINCRBY', P .. 'counts', to, 1)
  if batch then
    redis.call('HINCRBY', P .. 'batch:' .. batch, from, -1)
    redis.call('HINCRBY', P .. 'batch:' .. batch, to, 1)
  end
end

-- Forget a lane that has run empty. Its tenant keeps its place in the turns until it would be next: who submits
-- one job at a time must not be new each time.
local function close_lane(lane)
  if redis.call('EXISTS', P .. 'wait:' .. lane) == 1 then
    return
  end
  redis.call('SREM', P .. 'lanes', lane)
  redis.call('HDEL', P .. 'overtaken', lane)
  local version, class, _, model = split_lane(lane)
  local turns = turns_key(version, class, model)
  local tenant = redis.call('ZRANGE', turns, 0, 0)[1]
  while tenant and redis.call('EXISTS', P .. 'wait:' .. lane_name(version, class, tenant, model)) == 0 do
    redis.call('ZREM', turns, tenant)
    tenant = redis.call('ZRANGE', turns, 0, 0)[1]
  end
end

-- Out of whatever set its state keeps it in.
local function detach(id, job)
  redis.call('ZREM', P .. 'leases', id)
  if job.state == 'queued' and job.leader then
    redis.call('ZREM', P .. 'followers:' .. job.leader, id)
    redis.call('HINCRBY', P .. 'meta', 'followers', -1)
  elseif job.state == 'queued' then
    -- By its rank, which no other job has: its affinity is known only there, until it was pulled.
    local lane = waiting_lane(job.lane, job.crashes)
    redis.call('ZREMRANGEBYSCORE', P .. 'wait:' .. lane, job.seq, job.seq)
    close_lane(lane)
  elseif job.state == 'delayed' then
    redis.call('ZREM', P .. 'delayed', id)
  elseif job.worker and redis.call('HGET', P .. 'suspects', job.worker) == id then
    redis.call('HDEL', P .. 'suspects', job.worker)
  end
end

local function enqueue(id, job)
  detach(id, job)
  local lane = waiting_lane(job.lane, job.crashes)
  redis.call('ZADD', P .. 'wait:' .. lane, job.seq, member(id, job.affinity))
  open_lane(lane)
  redis.call('HSET', P .. 'job:' .. id, 'state', 'queued')
  count(job.batch, job.state, 'queued')
end

-- An execution that did not end its job, as the job's record will not tell of it any more once the next one
-- began. Jobs that run through have no history: what the record says is all of it. After a removal only.
local function remember(id, job, kind, code, message)
  redis.call('RPUSH', P .. 'history:' .. id, cjson.encode({
    kind = kind, at = int(NOW), started_at = job.started_at, worker = job.worker, attempt = job.attempt,
    code = code, message = message and string.sub(message, 1, 400)
  }))
  redis.call('LTRIM', P .. 'history:' .. id, -HISTORY, -1)
end

local function erase(id)
  redis.call('UNLINK', P .. 'job:' .. id, P .. 'in:' .. id, P .. 'out:' .. id, P .. 'ckpt:' .. id, P .. 'md:' .. id,
    P .. 'history:' .. id)
  redis.call('ZREM', P .. 'dead', id)
end

-- How long the record of an ended job stays. A batch keeps its jobs until it expires as a whole.
local function keep(id, job, state)
  if state == 'succeeded' then
    redis.call('UNLINK', P .. 'in:' .. id, P .. 'ckpt:' .. id)
  end
  if job.batch then
    redis.call('RPUSH', P .. 'bfeed:' .. job.batch, id)
    redis.call('ZADD', P .. 'bexpiry', int(NOW + BATCH_TTL), job.batch)
    return
  end
  local ttl = int(state == 'dead' and DEAD_TTL or DAY)
  for _, kind in ipairs({'job:', 'in:', 'out:', 'ckpt:', 'md:', 'history:'}) do
    redis.call('PEXPIRE', P .. kind .. id, ttl)
  end
end

-- A key whose job succeeded goes on answering for it; any other end frees the key.
local function settle_idempotency(id, job, state)
  local key = P .. 'idem:' .. job.idem
  if redis.call('GET', key) == id then
    if state == 'succeeded' then
      redis.call('PEXPIRE', key, int(job.batch and BATCH_TTL or DAY))
    else
      redis.call('UNLINK', key)
    end
  end
end

-- A job leaves all that concerns the living, and its end is recorded.
local function record_end(id, job, state, out)
  detach(id, job)
  if job.deadline then
    redis.call('ZREM', P .. 'deadlines', id)
  end
  if job.ending or job.due_at then
    redis.call('HDEL', P .. 'job:' .. id, 'ending', 'due_at')
  end
  if job.progress then
    redis.call('HSET', P .. 'job:' .. id, 'state', state, 'finished_at', int(NOW),
      'progress', job.progress, 'progress_at', job.progress_at)
  else
    redis.call('HSET', P .. 'job:' .. id, 'state', state, 'finished_at', int(NOW))
  end
  count(job.batch, job.state, state)
  redis.call('SET', P .. 'out:' .. id, out)
  if state == 'dead' then
    redis.call('ZADD', P .. 'dead', int(NOW), id)
  end
  if job.webhook then
    redis.call('ZADD', P .. 'outbox', int(NOW), id)
  end
  if job.relay then
    redis.call('ZADD', P .. 'outbox:' .. job.relay, int(NOW), id)
  end
  if job.idem then
    settle_idempotency(id, job, state)
  end
  keep(id, job, state)
  redis.call('PUBLISH', P .. 'ended', id)
  if job.batch then
    redis.call('PUBLISH', P .. 'ended', 'batch:' .. job.batch)
  end
  if job.stream then
    redis.call('PUBLISH', P .. 'feed', id)
  end
end

-- A leader's end as its follower's: the record begins with the id of whose it is.
local function copy_end(out, leader, id)
  local own = '{"id":"' .. leader .. '"'
  if string.sub(out, 1, #own) == own then
    return '{"id":"' .. id .. '"' .. string.sub(out, #own + 1)
  end
  return out
end

-- The first follower runs instead of a leader that has gone, at its own rank; the others follow it.
local function promote(followers)
  local first = followers[1]
  local job = load(first)
  detach(first, job)
  redis.call('HDEL', P .. 'job:' .. first, 'leader')
  job.leader = nil
  redis.call('SET', P .. 'twin:' .. job.twin, first, 'NX')
  for i = 2, #followers do
    local rank = redis.call('HGET', P .. 'job:' .. followers[i], 'seq')
    redis.call('HSET', P .. 'job:' .. followers[i], 'leader', first)
    redis.call('ZADD', P .. 'followers:' .. first, rank, followers[i])
  end
  enqueue(first, job)
end

-- Success is of the work, and so is death (the same work would kill five more workers): followers share them.
-- A cancel, a deadline or an error of the job itself ended the leader alone.
local function settle_followers(id, job, state, out)
  local twin = P .. 'twin:' .. job.twin
  if redis.call('GET', twin) == id then
    redis.call('UNLINK', twin)
  end
  local followers = redis.call('ZRANGE', P .. 'followers:' .. id, 0, -1)
  if #followers == 0 then
    return
  elseif state ~= 'succeeded' and state ~= 'dead' then
    redis.call('UNLINK', P .. 'followers:' .. id)
    promote(followers)
    return
  end
  for _, follower in ipairs(followers) do
    local copy = load(follower)
    copy.progress, copy.progress_at = job.progress, job.progress_at
    record_end(follower, copy, state, copy_end(out, id, follower))
  end
end

-- The end of a job: terminal is for ever.
local function finish(id, job, state, out)
  record_end(id, job, state, out)
  if job.twin and not job.leader then
    settle_followers(id, job, state, out)
  end
end

-- A deadline holds for whoever asks, also where no worker lives to sweep.
local function expire_if_late(id)
  local found = redis.call('HMGET', P .. 'job:' .. id, 'state', 'deadline')
  if (found[1] == 'queued' or found[1] == 'delayed') and found[2] and tonumber(found[2]) <= NOW then
    finish(id, load(id), 'expired', EXPIRED)
  end
end

-- Ask for the end of a running job: its worker hears it on the channel, or with its next renewal.
local function ask_to_end(id, state)
  redis.call('HSET', P .. 'job:' .. id, 'ending', state)
  redis.call('PUBLISH', P .. 'cancel', id)
end
