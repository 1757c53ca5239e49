-- @include core/hooks
-- @include core/states
-- @include core/clock
-- @hooks on_sweep
-- Transitions caused by time. Any client or worker may run them, so nothing waits for a worker that no longer exists.

-- Losing the lease of a job that had entered a step without making progress counts as a crash; other losses do not.
local function reclaim(id, job)
  local crashes = tonumber(job.crashes or 0)
  if job.stepped and not job.advanced then
    crashes = crashes + 1
  end
  redis.call('HDEL', P .. 'job:' .. id, 'token')
  redis.call('HSET', P .. 'job:' .. id, 'lost_by', job.worker)
  remember(id, job, crashes > tonumber(job.crashes or 0) and 'crashed' or 'lost')
  if crashes > 0 then
    redis.call('HSET', P .. 'job:' .. id, 'crashes', crashes)
  end
  if crashes >= 5 then
    finish(id, job, 'dead', CRASHED)
    return 'dead', crashes
  end
  -- The suspects' record is stored under the worker, so detach needs the earlier job, and the lane the changed one.
  detach(id, job)
  job.crashes = crashes
  enqueue(id, job)
  return 'reclaimed'
end

-- Maximum of leases and of pauses before a retry. A live worker renews its leases within seconds.
local MAX_LEASE = 600000
local MAX_RETRY_PAUSE = 600000

local function sweep_leases(limit, patience, done)
  local lapsed = redis.call('ZRANGEBYSCORE', P .. 'leases', '-inf', int(NOW - patience), 'LIMIT', 0, limit)
  for _, id in ipairs(lapsed) do
    if ends >= MAX_ENDS then
      return
    end
    local job = load(id)
    local ending = job and (job.ending or (tonumber(job.deadline or math.huge) <= NOW and 'expired'))
    if not job or job.state ~= 'running' then
      redis.call('ZREM', P .. 'leases', id)
    elseif ending then
      redis.call('HDEL', P .. 'job:' .. id, 'token')
      finish(id, job, ending, ENDED[ending])
      done[ending] = done[ending] + 1
    else
      local became, crashes = reclaim(id, job)
      done[became] = done[became] + 1
      done.lapsed[#done.lapsed + 1] = {id, job.worker}
      if became == 'dead' then
        done.buried[#done.buried + 1] = {id, crashes}
      end
    end
  end
end

local function bring_retries_near(limit)
  for _, id in ipairs(bring_near(P .. 'retrying', MAX_RETRY_PAUSE, SOON, limit)) do
    redis.call('ZADD', P .. 'delayed', int(NOW + SOON), id)
    redis.call('HSET', P .. 'job:' .. id, 'due_at', int(NOW + SOON))
  end
end

local function sweep_delayed(limit, done)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'delayed', '-inf', int(NOW), 'LIMIT', 0, limit)) do
    local job = load(id)
    if not job or job.state ~= 'delayed' then
      redis.call('ZREM', P .. 'delayed', id)
      redis.call('ZREM', P .. 'retrying', id)
    else
      enqueue(id, job)
      redis.call('HDEL', P .. 'job:' .. id, 'due_at')
      done.promoted = done.promoted + 1
    end
  end
end

local function sweep_deadlines(limit, done)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'deadlines', '-inf', int(NOW), 'LIMIT', 0, limit)) do
    if ends >= MAX_ENDS then
      return
    end
    local job = load(id)
    redis.call('ZREM', P .. 'deadlines', id)
    if job and (job.state == 'queued' or job.state == 'delayed') then
      finish(id, job, 'expired', EXPIRED)
      done.expired = done.expired + 1
    elseif job and job.state == 'running' and not job.ending then
      ask_to_end(id, 'expired')
    end
  end
end

-- Duplicates whose primary job has ended, and that have not received its end yet.
local function sweep_settling()
  for _, leader in ipairs(redis.call('ZRANGE', P .. 'settling', 0, 7)) do
    settle_followers(leader)
  end
end

-- Purge the oldest expired batch in slices. A batch with unfinished jobs gets more time.
local function sweep_batches(limit)
  local batch = redis.call('ZRANGEBYSCORE', P .. 'bexpiry', '-inf', int(NOW), 'LIMIT', 0, 1)[1]
  if not batch then
    return
  end
  for _, state in ipairs(redis.call('HMGET', P .. 'batch:' .. batch, 'queued', 'delayed', 'running')) do
    if tonumber(state or 0) > 0 then
      redis.call('ZADD', P .. 'bexpiry', int(NOW + BATCH_TTL), batch)
      return
    end
  end
  for _, id in ipairs(redis.call('LRANGE', P .. 'bjobs:' .. batch, 0, limit - 1)) do
    erase(id)
  end
  redis.call('LTRIM', P .. 'bjobs:' .. batch, limit, -1)
  if redis.call('EXISTS', P .. 'bjobs:' .. batch) == 0 then
    redis.call('ZREM', P .. 'bexpiry', batch)
    redis.call('UNLINK', P .. 'batch:' .. batch, P .. 'bfeed:' .. batch, P .. 'backed:' .. batch,
      P .. 'bowner:' .. batch)
  end
end

-- Remove workers that have been silent for longer than any lease, so that they hold no jobs, and workers whose time
-- lies in the future because the clock was set back: a live worker registers again.
local function sweep_workers(limit)
  local past, far = int(NOW - MAX_LEASE), int(NOW + MAX_LEASE)
  for _, range in ipairs({{'-inf', past}, {far, '+inf'}}) do
    for _, worker in ipairs(redis.call('ZRANGEBYSCORE', P .. 'workers', range[1], range[2], 'LIMIT', 0, limit)) do
      redis.call('ZREM', P .. 'workers', worker)
      redis.call('UNLINK', P .. 'worker:' .. worker, P .. 'puller:' .. worker)
    end
  end
end

local SWEPT = {'reclaimed', 'dead', 'cancelled', 'expired', 'promoted', 'next_due', 'buried', 'lapsed', 'memory'}

-- Returns counts by name; `next_due`, the ms until the next delayed job is due, or -1; `buried`, the id and crashes of each
-- that became dead; and `lapsed`, the id and worker of each whose lease lapsed.
local function sweep(limit, patience)
  local done = {reclaimed = 0, dead = 0, cancelled = 0, expired = 0, promoted = 0, buried = {}, lapsed = {}}
  sweep_settling()
  sweep_leases(limit, patience, done)
  bring_near(P .. 'leases', MAX_LEASE, SOON, limit)
  sweep_deadlines(limit, done)
  call_all(on_sweep, limit)
  bring_retries_near(limit)
  sweep_delayed(limit, done)
  sweep_batches(limit)
  sweep_workers(limit)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'dead', '-inf', int(NOW - DEAD_TTL), 'LIMIT', 0, limit)) do
    redis.call('ZREM', P .. 'dead', id)
  end
  local due = redis.call('ZRANGE', P .. 'delayed', 0, 0, 'WITHSCORES')[2]
  done.next_due = due and tonumber(due) < HELD and math.max(0, due - NOW) or -1
  return done
end

-- Names and values that `sweep` returned, without those that are 0, empty or -1.
local function swept_reply(done)
  local reply = {}
  for _, name in ipairs(SWEPT) do
    local value = done[name]
    local size = type(value) == 'table' and #value or value or 0
    if size > 0 or (name == 'next_due' and size == 0) then
      reply[#reply + 1] = name
      reply[#reply + 1] = value
    end
  end
  return reply
end
