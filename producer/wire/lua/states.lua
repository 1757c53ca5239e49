-- @include common
-- Moving jobs between states. Callers check first, then call these, which only write and begin with a
-- removal: after a script's first write a server at maxmemory lets the rest of it through.
local DAY = 86400000
local BATCH_TTL = 7 * DAY
local DEAD_TTL = 14 * DAY
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

local function leave_lane(id, lane)
  redis.call('ZREM', P .. 'wait:' .. lane, id)
  if redis.call('EXISTS', P .. 'wait:' .. lane) == 0 then
    local version, class, tenant, model = split_lane(lane)
    redis.call('SREM', P .. 'lanes', lane)
    redis.call('ZREM', turns_key(version, class, model), tenant)
  end
end

-- Out of whatever set its state keeps it in.
local function detach(id, job)
  redis.call('ZREM', P .. 'leases', id)
  if job.state == 'queued' then
    leave_lane(id, waiting_lane(job.lane, job.crashes))
  elseif job.state == 'delayed' then
    redis.call('ZREM', P .. 'delayed', id)
  elseif job.worker and redis.call('HGET', P .. 'suspects', job.worker) == id then
    redis.call('HDEL', P .. 'suspects', job.worker)
  end
end

local function enqueue(id, job)
  detach(id, job)
  local lane = waiting_lane(job.lane, job.crashes)
  redis.call('ZADD', P .. 'wait:' .. lane, job.seq, id)
  open_lane(lane)
  redis.call('HSET', P .. 'job:' .. id, 'state', 'queued')
  count(job.batch, job.state, 'queued')
end

local function erase(id)
  redis.call('UNLINK', P .. 'job:' .. id, P .. 'in:' .. id, P .. 'out:' .. id, P .. 'ckpt:' .. id, P .. 'md:' .. id)
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
  for _, kind in ipairs({'job:', 'in:', 'out:', 'ckpt:', 'md:'}) do
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

-- The end of a job: terminal is for ever.
local function finish(id, job, state, out)
  detach(id, job)
  redis.call('ZREM', P .. 'deadlines', id)
  redis.call('HDEL', P .. 'job:' .. id, 'ending', 'due_at')
  redis.call('HSET', P .. 'job:' .. id, 'state', state, 'finished_at', int(NOW))
  count(job.batch, job.state, state)
  redis.call('SET', P .. 'out:' .. id, out)
  if state == 'dead' then
    redis.call('ZADD', P .. 'dead', int(NOW), id)
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

-- Ask for the end of a running job: its worker hears it on the channel, or with its next renewal.
local function ask_to_end(id, state)
  redis.call('HSET', P .. 'job:' .. id, 'ending', state)
  redis.call('PUBLISH', P .. 'cancel', id)
end
