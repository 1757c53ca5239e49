-- Sweep, then lease waiting jobs to a worker: reading and accepting are one step.
-- KEYS[1] prefix
-- ARGV[1] worker id  [2] lease in ms  [3] maximum number of jobs  [4] maximum cost (tokens)  [5] jobs it holds
-- ARGV[6] maximum tokens of a sequence  [7] the words it knows: 1 and its words, joined by +
-- ARGV[8] classes to pull from: 012, or 0 if it has capacity for urgent jobs only  [9] and on: the models it serves
-- Returns names and values: jobs, swept (as `sweep`), paused (0 or 1), queued (jobs waiting in lanes; 0 if this worker
--   cannot take any of them now), limited (ms until the rate limit lets the next job start, or -1), bells (names whose
--   bells to wait for; empty: all). A job is {words, payload, and its checkpoint list if it has one}; words are lines
--   `<name>=<value>`: id, token, attempt, at, cost, and if present alone (1: a suspect), crashes, deadline, lost_by,
--   fingerprint and fields of features. Many separate values would cost the server more than their bytes.
-- @include core/hooks
-- @include core/states
-- @include core/sweeping
-- @include core/choosing
-- @include core/homing
-- @include outputs
local RESERVED_FOR = 10000
-- Maximum number of jobs found past their deadline, or broken, in one call: the server must not block for all of them.
local MAX_ENDED = 64
local lease, max_jobs, credit = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local holding = tonumber(ARGV[5])
-- Maximum bytes of payloads and checkpoints in one reply; the last job may exceed it.
local MAX_BYTES = 4194304
local jobs, leases, moved = {}, {}, {}
local lapses = int(NOW + lease)
local longest, bytes = tonumber(ARGV[6]), 0
local token

-- Lease a job that has left its lane to the worker.
local function give(id, job, affinity, payload, alone)
  -- Tokens are reserved in groups: gaps between them are harmless.
  token = (token or redis.call('HINCRBY', P .. 'meta', 'token', max_jobs) - max_jobs) + 1
  leases[#leases + 1] = lapses
  leases[#leases + 1] = id
  local key, text = P .. 'job:' .. id, int(token)
  local attempt = job.failures and int(job.failures + 1) or '1'
  local entries
  if job.attempt then
    redis.call('HDEL', key, 'stepped', 'advanced', 'returned', 'progress', 'progress_at', 'lost_by')
    entries = redis.call('LRANGE', P .. 'ckpt:' .. id, 0, -1)
    bytes = bytes + tonumber(job.saved or 0)
  end
  if job.given then
    payload = payload .. outputs_of(job.given)
  end
  bytes = bytes + #payload
  local fields = {
    'state', 'running', 'worker', worker, 'token', text, 'started_at', NOW_TEXT, 'attempt', attempt
  }
  if affinity and not job.affinity then
    -- The job may return to the lane.
    fields[#fields + 1] = 'affinity'
    fields[#fields + 1] = affinity
  end
  redis.call('HSET', key, unpack(fields))
  if job.batch then
    moved[job.batch] = (moved[job.batch] or 0) + 1
  end
  if alone then
    redis.call('HSET', P .. 'suspects', worker, id)
    has_suspects = true
  end
  local words = 'id=' .. id .. '\ntoken=' .. text .. '\nattempt=' .. attempt .. '\nat=' .. job.at .. '\ncost=' .. job.cost
  if alone then
    words = words .. '\nalone=1'
  end
  for _, name in ipairs(given) do
    if job[name] then
      words = words .. '\n' .. name .. '=' .. job[name]
    end
  end
  jobs[#jobs + 1] = {words, payload, entries}
end

-- Take a job from a lane. Returns false if it costs more than is left: no other job overtakes it then, or an expensive
-- job would wait forever.
local function take(lane, in_order, alone)
  local name, rank, id, affinity = candidate(lane, in_order)
  local job = load(id)
  local payload = job and redis.call('GET', P .. 'in:' .. id)
  if not job or job.state ~= 'queued' then
    leaving.add(lane, name, affinity, rank)
  elseif tonumber(job.deadline or math.huge) <= NOW then
    write_turns()
    finish(id, job, 'expired', EXPIRED)
  elseif not payload then
    write_turns()
    finish(id, job, 'failed', LOST_PAYLOAD)
  else
    -- A sequence cannot be longer than the context, whatever length the job requests.
    local cost = math.min(tonumber(job.cost), longest * tonumber(job.width or job.n or 1))
    for _, hook in ipairs(may_start) do
      local park = hook(job, lane, cost)
      if park and name ~= oldest(lane) then
        return take(lane, true, alone) -- the oldest may cost less, or was charged before
      elseif park then
        write_turns()
        park()
        place_for(lane).alone = nil
        return true
      end
    end
    if cost > credit and holding + #jobs > 0 then
      return false
    end
    credit = credit - cost
    leaving.add(lane, name, affinity, rank)
    if job.near then
      affinity = job.affinity -- the lane had another name in its place
    end
    call_all(on_start, id, job, lane, cost)
    give(id, job, affinity, payload, alone)
    note_turn(lane)
  end
  note_taken(lane, name, affinity, in_order)
  return true
end

-- Whether the worker runs a suspect, next to which no other job may run.
local function runs_suspect()
  local id = redis.call('HGET', P .. 'suspects', worker)
  local job = id and redis.call('HMGET', P .. 'job:' .. id, 'state', 'worker')
  return job and job[1] == 'running' and job[2] == worker
end

-- A suspect that has waited long reserves one busy worker, which takes no other jobs until it is idle.
local function reserve(lane)
  if age(lane) <= AGEING then
    return false
  end
  local held = redis.call('HMGET', P .. 'meta', 'reserved_by', 'reserved_until')
  local left = tonumber(held[2] or 0) - NOW
  if held[1] and held[1] ~= worker and left > 0 and left <= RESERVED_FOR then
    return false
  end
  redis.call('HSET', P .. 'meta', 'reserved_by', worker, 'reserved_until', int(NOW + RESERVED_FOR))
  return true
end

-- The number of jobs that the rate limit lets start now (a bucket that fills at `rate` per second up to `burst`).
local rate = tonumber(meta[3])
local function level()
  local burst = tonumber(meta[4] or 1)
  return math.min(burst, tonumber(meta[5] or burst) + math.max(0, NOW - (meta[6] or NOW)) * rate / 1000)
end

-- Returns whether there may be more jobs to take; nil if there are none.
local function take_all()
  has_opened = false -- a lane that is opened after this is not among those to choose from: its bell is kept
  local suspect = not is_urgent and lane_of('s')
  if suspect and holding == 0 then
    take(suspect, true, true)
  end
  local waits = #jobs > 0 or (suspect and holding > 0 and reserve(suspect))
  local looked = 0
  while not waits and #jobs < max_jobs and bytes <= MAX_BYTES and ends < MAX_ENDS
    and looked < max_jobs + MAX_ENDED do
    local lane, in_order = choose()
    looked = looked + 1
    if not lane then
      for _, model in ipairs(is_urgent and {} or models) do
        if skipped >= MAX_SKIPPED then
          ring(model)
        elseif not has_opened then
          redis.call('UNLINK', P .. 'bell:' .. model)
        end
      end
      return
    end
    waits = not take(in_order and lane or or_another(lane), in_order, false)
  end
  return not waits
end

-- Write the values that all jobs of this call share.
local function settle()
  redis.call('ZADD', P .. 'leases', unpack(leases))
  redis.call('HINCRBY', P .. 'counts', 'queued', -#jobs)
  redis.call('HINCRBY', P .. 'counts', 'running', #jobs)
  for batch, count in pairs(moved) do
    redis.call('HINCRBY', P .. 'batch:' .. batch, 'queued', -count)
    redis.call('HINCRBY', P .. 'batch:' .. batch, 'running', count)
  end
  if rate then
    redis.call('HSET', P .. 'meta', 'level', level() - #jobs, 'level_at', int(NOW))
  end
  call_all(on_flush)
end

-- Wake another worker for the remaining jobs, or this one if it found none among those it checked.
local function ring_for_the_rest()
  local left = choose()
  if left then
    local _, _, _, model = split_lane(left)
    ring(model)
  end
end

if rate and tonumber(meta[6] or 0) > NOW then
  -- The clock was set back: the bucket fills from now on instead of when the clock has caught up.
  redis.call('HDEL', P .. 'meta', 'level_at')
  redis.call('HSET', P .. 'meta', 'level_at', int(NOW))
  meta[6] = NOW
end
local swept = sweep(64, 0)
narrow_models() -- after the sweep, which may have changed what the worker may take
local paused = meta[2] == '1'
local limited = -1
if rate then
  max_jobs = math.min(max_jobs, math.floor(level()))
  limited = level() < 1 and math.ceil((1 - level()) * 1000 / rate) or -1
  if limited > 0 then
    call_all(on_limited, limited)
  end
end
local nothing_left = false
if not paused and max_jobs > 0 and not runs_suspect() then
  local may_be_more = take_all()
  nothing_left = may_be_more == nil
  if #jobs > 0 then
    settle()
  end
  if #jobs > 0 or may_be_more then
    ring_for_the_rest()
  end
  save_choices()
end
for _, hook in ipairs(on_due) do
  swept.next_due = hook(swept.next_due)
end
local queued = 0
if not nothing_left then
  queued = (redis.call('HGET', P .. 'counts', 'queued') or 0) - (redis.call('HGET', P .. 'meta', 'followers') or 0)
end
return {
  'jobs', jobs, 'swept', swept_reply(swept), 'paused', paused and 1 or 0, 'queued', tonumber(queued), 'limited', limited,
  'bells', #models < #ARGV - 8 and models or {}
}
