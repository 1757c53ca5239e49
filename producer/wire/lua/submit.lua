-- Store jobs and let them wait.
-- KEYS[1] prefix `pagemill:{<queue>}:`
-- ARGV[1] batch id, or ''
-- ARGV[2] how many jobs may wait, unless the queue has a limit of its own. No further argument: an empty batch.
-- ARGV[3], ARGV[4] and so on: header and payload of each job. The payload is the envelope, stored byte for byte.
--   The header is JSON: id, lane `<version>:<class>:<tenant>:<model>` (class 0 high, 1 normal, 2 low), cost (tokens);
--   where they apply also delay, ttl (ms from now), run_at, deadline (unix ms), max_attempts, n, stream (1),
--   key (the name inside the batch), idem `<tenant>:<idempotency key>`, digest (of the work), metadata (JSON text),
--   invalid (an error as JSON text: the row is no job, and is recorded in its batch as failed).
-- Returns one {status, id} per job: created; exists (this id was submitted before); same, conflict (the
--   idempotency key belongs to that id, with an equal or another digest); full (nothing was stored).
-- @include common

-- Check everything before the first write: Lua has no rollback.
local TYPES = {
  id = 'string', lane = 'string', key = 'string', idem = 'string', digest = 'string', metadata = 'string',
  invalid = 'string', cost = 'number', delay = 'number', ttl = 'number', run_at = 'number', deadline = 'number',
  max_attempts = 'number', n = 'number', stream = 'number'
}

local function is_sound(job)
  for name, value in pairs(job) do
    if type(value) ~= TYPES[name] then
      return false
    end
  end
  return job.cost and (not job.invalid or ARGV[1] ~= '') and string.match(job.id or '', '^[%w._-]+$')
    and string.match(job.lane or '', '^%d+:[012]:[%w._@-]+:.+$')
end

local jobs = {}
for i = 3, #ARGV, 2 do
  local read, job = pcall(cjson.decode, ARGV[i])
  if not read or type(job) ~= 'table' or not is_sound(job) or not ARGV[i + 1] then
    return redis.error_reply('PAGEMILL bad header at ARGV ' .. i)
  end
  job.payload = ARGV[i + 1]
  jobs[#jobs + 1] = job
end

local batch = ARGV[1] ~= '' and ARGV[1] or nil
local limit = tonumber(redis.call('HGET', P .. 'meta', 'limit') or ARGV[2])
local depth = redis.call('HMGET', P .. 'counts', 'queued', 'delayed')
local room = limit - (depth[1] or 0) - (depth[2] or 0)
local seq
local lanes, queued, delayed, failed = {}, 0, 0, 0

-- The status of a job that is not to be stored, and the id it goes by; nil for a new one.
local function known(job)
  if redis.call('EXISTS', P .. 'job:' .. job.id) == 1 then
    return 'exists', job.id
  end
  if batch and redis.call('SISMEMBER', P .. 'backed:' .. batch, job.id) == 1 then
    return 'exists', job.id
  end
  local other = job.idem and redis.call('GET', P .. 'idem:' .. job.idem)
  if other then
    local state = redis.call('HGET', P .. 'job:' .. other, 'state')
    if state == 'queued' or state == 'delayed' or state == 'running' or state == 'succeeded' then
      return redis.call('HGET', P .. 'job:' .. other, 'digest') == job.digest and 'same' or 'conflict', other
    end
  end
  if room <= 0 then
    return 'full', job.id
  end
end

local function store(job)
  redis.call('SET', P .. 'in:' .. job.id, job.payload)
  if not seq then
    seq = redis.call('HINCRBY', P .. 'meta', 'seq', #jobs) - #jobs
  end
  seq = seq + 1
  room = room - 1
  local due = math.max(job.run_at or 0, job.delay and NOW + job.delay or 0)
  local state = due > NOW and 'delayed' or 'queued'
  local fields = {'state', state, 'lane', job.lane, 'seq', int(seq), 'cost', int(job.cost), 'created_at', int(NOW)}
  local function set(name, value)
    if value then
      fields[#fields + 1] = name
      fields[#fields + 1] = type(value) == 'number' and int(value) or value
    end
  end
  local deadline = math.min(job.deadline or math.huge, job.ttl and NOW + job.ttl or math.huge)
  set('deadline', deadline < math.huge and deadline)
  set('max_attempts', job.max_attempts)
  set('n', job.n)
  set('stream', job.stream)
  set('batch', batch)
  set('key', job.key)
  set('idem', job.idem)
  set('digest', job.idem and job.digest)
  set('due_at', state == 'delayed' and due)
  redis.call('HSET', P .. 'job:' .. job.id, unpack(fields))
  if job.metadata then
    redis.call('SET', P .. 'md:' .. job.id, job.metadata)
  end
  if job.idem then
    redis.call('SET', P .. 'idem:' .. job.idem, job.id)
  end
  if deadline < math.huge then
    redis.call('ZADD', P .. 'deadlines', int(deadline), job.id)
  end
  if batch then
    redis.call('RPUSH', P .. 'bjobs:' .. batch, job.id)
  end
  if state == 'delayed' then
    redis.call('ZADD', P .. 'delayed', int(due), job.id)
    delayed = delayed + 1
  else
    redis.call('ZADD', P .. 'wait:' .. job.lane, int(seq), job.id)
    lanes[job.lane] = true
    queued = queued + 1
  end
end

-- A row that is no job: it is in its batch as a failed one, so that the counts add up to the rows.
local function record_invalid(job)
  redis.call('SET', P .. 'out:' .. job.id, job.invalid)
  redis.call('HSET', P .. 'job:' .. job.id, 'state', 'failed', 'lane', job.lane, 'created_at', int(NOW),
    'finished_at', int(NOW), 'batch', batch, 'key', job.key or '')
  if job.metadata then
    redis.call('SET', P .. 'md:' .. job.id, job.metadata)
  end
  redis.call('RPUSH', P .. 'bjobs:' .. batch, job.id)
  redis.call('RPUSH', P .. 'bfeed:' .. batch, job.id)
  failed = failed + 1
end

local replies = {}
for i, job in ipairs(jobs) do
  local status, id = known(job)
  if not status then
    if job.invalid then
      record_invalid(job)
    else
      store(job)
    end
    status, id = 'created', job.id
  end
  replies[i] = {status, id}
end

local function add(key)
  redis.call('HINCRBY', key, 'queued', queued)
  redis.call('HINCRBY', key, 'delayed', delayed)
  redis.call('HINCRBY', key, 'failed', failed)
end
if batch then
  redis.call('HSETNX', P .. 'batch:' .. batch, 'created_at', int(NOW))
  redis.call('HINCRBY', P .. 'batch:' .. batch, 'total', queued + delayed + failed)
  redis.call('ZADD', P .. 'bexpiry', int(NOW + 604800000), batch)
  add(P .. 'batch:' .. batch)
end
if queued + delayed + failed > 0 then
  add(P .. 'counts')
end
for lane in pairs(lanes) do
  open_lane(lane)
end
return replies
