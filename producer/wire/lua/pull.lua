-- Sweep, then lease waiting jobs to a worker: reading and accepting are one step.
-- KEYS[1] prefix
-- ARGV[1] worker id  [2] lease in ms  [3] jobs at most  [4] cost at most, in tokens  [5] jobs the worker holds
-- ARGV[6] envelope versions it reads, comma-separated  [7] and on: the models it serves
-- Returns {jobs, sweep's reply, paused (0 or 1), jobs queued}, each job being
--   {id, token, payload, attempt, crashes, alone (0 or 1), created_at, deadline or '', fingerprint, checkpoint list}
-- @include sweeping
local AGEING = 30000
local SHARE = 8
local worker, lease, max_jobs, credit = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local holding = tonumber(ARGV[5])
local jobs = {}

-- The lane of a class whose tenant was served longest ago.
local function next_lane(class)
  local best, best_turn
  for version in string.gmatch(ARGV[6], '%d+') do
    for i = 7, #ARGV do
      local turn = redis.call('ZRANGE', turns_key(version, class, ARGV[i]), 0, 0, 'WITHSCORES')
      if turn[1] and (not best or tonumber(turn[2]) < best_turn) then
        best, best_turn = version .. ':' .. class .. ':' .. turn[1] .. ':' .. ARGV[i], tonumber(turn[2])
      end
    end
  end
  return best
end

local function head(lane)
  return redis.call('ZRANGE', P .. 'wait:' .. lane, 0, 0)[1]
end

local function age(lane)
  local id = head(lane)
  return NOW - tonumber(id and redis.call('HGET', P .. 'job:' .. id, 'created_at') or NOW)
end

-- High before normal before low; but every eighth job is the one that has waited longest, once that is long:
-- a steady flow of urgent jobs leaves the others an eighth of the worker, and never nothing.
local function choose()
  local turn = tonumber(redis.call('HGET', P .. 'meta', 'turn') or 0)
  local first, oldest, oldest_age
  for _, class in ipairs({'0', '1', '2'}) do
    local lane = next_lane(class)
    first = first or lane
    if lane and turn % SHARE == SHARE - 1 then
      local waited = age(lane)
      if waited > AGEING and (not oldest or waited > oldest_age) then
        oldest, oldest_age = lane, waited
      end
    elseif lane then
      break
    end
  end
  return oldest or first
end

local function give(id, job, payload, alone)
  detach(id, job)
  local token = redis.call('HINCRBY', P .. 'meta', 'token', 1)
  local turn = redis.call('HINCRBY', P .. 'meta', 'turn', 1)
  local version, class, tenant, model = split_lane(waiting_lane(job.lane, job.crashes))
  redis.call('ZADD', turns_key(version, class, model), 'XX', turn, tenant)
  redis.call('ZADD', P .. 'leases', int(NOW + lease), id)
  local attempt = tonumber(job.failures or 0) + 1
  redis.call('HDEL', P .. 'job:' .. id, 'stepped', 'advanced', 'returned', 'progress', 'progress_at')
  redis.call('HSET', P .. 'job:' .. id, 'state', 'running', 'worker', worker, 'token', token,
    'started_at', int(NOW), 'attempt', attempt)
  count(job.batch, 'queued', 'running')
  if alone then
    redis.call('HSET', P .. 'suspects', worker, id)
  end
  jobs[#jobs + 1] = {
    id, token, payload, attempt, tonumber(job.crashes or 0), alone and 1 or 0, job.created_at, job.deadline or '',
    job.fingerprint or '', redis.call('LRANGE', P .. 'ckpt:' .. id, 0, -1)
  }
end

-- Take the head of a lane. Returns false when it costs more than is left: nothing overtakes it then, or a
-- dear job would wait for ever.
local function take(lane, alone)
  local id = head(lane)
  local job = id and load(id)
  if not job or job.state ~= 'queued' then
    leave_lane(id or '', lane)
    return true
  end
  local payload = redis.call('GET', P .. 'in:' .. id)
  if not payload then
    finish(id, job, 'failed', LOST_PAYLOAD)
    return true
  end
  local cost = tonumber(job.cost)
  if cost > credit and holding + #jobs > 0 then
    return false
  end
  credit = credit - cost
  give(id, job, payload, alone)
  return true
end

-- The worker runs a suspect now, and nothing may run beside one.
local function runs_suspect()
  local id = redis.call('HGET', P .. 'suspects', worker)
  local job = id and redis.call('HMGET', P .. 'job:' .. id, 'state', 'worker')
  return job and job[1] == 'running' and job[2] == worker
end

-- A suspect that has waited long makes one busy worker run empty for it.
local function reserve(lane)
  if age(lane) <= AGEING then
    return false
  end
  local held = redis.call('HMGET', P .. 'meta', 'reserved_by', 'reserved_until')
  if held[1] and held[1] ~= worker and tonumber(held[2]) > NOW then
    return false
  end
  redis.call('HSET', P .. 'meta', 'reserved_by', worker, 'reserved_until', int(NOW + 10000))
  return true
end

local swept = sweep(64)
local paused = redis.call('HGET', P .. 'meta', 'paused') == '1'
if not paused and max_jobs > 0 and not runs_suspect() then
  local suspect = next_lane('s')
  if suspect and holding == 0 then
    take(suspect, true)
  end
  local waits = #jobs > 0 or (suspect and holding > 0 and reserve(suspect))
  while not waits and #jobs < max_jobs do
    local lane = choose()
    if not lane then
      for i = 7, #ARGV do
        redis.call('UNLINK', P .. 'bell:' .. ARGV[i])
      end
      break
    end
    waits = not take(lane, false)
  end
  local left = #jobs > 0 and choose()
  if left then
    local _, _, _, model = split_lane(left)
    ring(model)
  end
end
return {jobs, swept, paused and 1 or 0, tonumber(redis.call('HGET', P .. 'counts', 'queued') or 0)}
