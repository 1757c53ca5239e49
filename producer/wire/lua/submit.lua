-- Store jobs and let them wait.
-- KEYS[1] prefix `pagemill:{<queue>}:`
-- ARGV[1] batch id, or ''
-- ARGV[2] how many jobs may wait, unless the queue has a limit of its own. No further argument: an empty batch.
-- ARGV[3], ARGV[4] and so on: header and payload of each job. The payload is the envelope, stored byte for byte.
--   The header is JSON: id, lane `<version>:<class>:<tenant>:<model>` (class 0 high, 1 normal, 2 low), cost (tokens);
--   where they apply also delay, ttl (ms from now), run_at, deadline (unix ms), max_attempts, n, stream (1),
--   key (the name inside the batch), idem `<tenant>:<idempotency key>`, digest (of the work), metadata (JSON text),
--   invalid (an error as JSON text: the row is no job, and is recorded in its batch as failed).
-- Returns one word per job, separated by spaces: created | exists (this id was submitted before) | full (not stored)
--   | same:<id> | conflict:<id> (the idempotency key belongs to that id, with an equal or another digest).
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
local has_acked = batch and redis.call('EXISTS', P .. 'backed:' .. batch) == 1
local seq
local lanes, members, queued, delayed, failed = {}, {}, 0, 0, 0

-- Collect arguments per key and send them a few hundred at a time: one call is much dearer than one argument.
local function flush(command, key, args)
  if #args > 0 then
    redis.call(command, key, unpack(args))
  end
  return {}
end

-- The word for a job that is not to be stored; nil for a new one.
local function known(job)
  if redis.call('EXISTS', P .. 'job:' .. job.id) == 1 then
    return 'exists'
  end
  if has_acked and redis.call('SISMEMBER', P .. 'backed:' .. batch, job.id) == 1 then
    return 'exists'
  end
  local other = job.idem and redis.call('GET', P .. 'idem:' .. job.idem)
  if other then
    local found = redis.call('HMGET', P .. 'job:' .. other, 'state', 'digest')
    local state = found[1]
    if state == 'queued' or state == 'delayed' or state == 'running' or state == 'succeeded' then
      return (found[2] == job.digest and 'same:' or 'conflict:') .. other
    end
  end
  if room <= 0 then
    return 'full'
  end
end

local function join_batch(id)
  members[#members + 1] = id
  if #members >= 500 then
    members = flush('RPUSH', P .. 'bjobs:' .. batch, members)
  end
end

local function wait(job, rank)
  local lane = lanes[job.lane] or {}
  lane[#lane + 1] = rank
  lane[#lane + 1] = job.id
  lanes[job.lane] = #lane < 500 and lane or flush('ZADD', P .. 'wait:' .. job.lane, lane)
  queued = queued + 1
end

local OPTIONAL = {'max_attempts', 'n', 'stream', 'key', 'idem', 'digest'}

local function store(job)
  redis.call('SET', P .. 'in:' .. job.id, job.payload)
  seq = (seq or redis.call('HINCRBY', P .. 'meta', 'seq', #jobs) - #jobs) + 1
  room = room - 1
  local due = math.max(job.run_at or 0, job.delay and NOW + job.delay or 0)
  local state = due > NOW and 'delayed' or 'queued'
  local rank = int(seq)
  local fields = {'state', state, 'lane', job.lane, 'seq', rank, 'cost', int(job.cost), 'created_at', int(NOW)}
  for _, name in ipairs(OPTIONAL) do
    if job[name] then
      fields[#fields + 1] = name
      fields[#fields + 1] = type(job[name]) == 'number' and int(job[name]) or job[name]
    end
  end
  if batch then
    fields[#fields + 1] = 'batch'
    fields[#fields + 1] = batch
    join_batch(job.id)
  end
  local deadline = math.min(job.deadline or math.huge, job.ttl and NOW + job.ttl or math.huge)
  if deadline < math.huge then
    fields[#fields + 1] = 'deadline'
    fields[#fields + 1] = int(deadline)
    redis.call('ZADD', P .. 'deadlines', int(deadline), job.id)
  end
  if state == 'delayed' then
    fields[#fields + 1] = 'due_at'
    fields[#fields + 1] = int(due)
    redis.call('ZADD', P .. 'delayed', int(due), job.id)
    delayed = delayed + 1
  else
    wait(job, rank)
  end
  redis.call('HSET', P .. 'job:' .. job.id, unpack(fields))
  if job.metadata then
    redis.call('SET', P .. 'md:' .. job.id, job.metadata)
  end
  if job.idem then
    redis.call('SET', P .. 'idem:' .. job.idem, job.id)
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
  join_batch(job.id)
  redis.call('RPUSH', P .. 'bfeed:' .. batch, job.id)
  failed = failed + 1
end

local words = {}
for i, job in ipairs(jobs) do
  local word = known(job)
  if not word then
    word = 'created'
    if job.invalid then
      record_invalid(job)
    else
      store(job)
    end
  end
  words[i] = word
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
  flush('RPUSH', P .. 'bjobs:' .. batch, members)
end
if queued + delayed + failed > 0 then
  add(P .. 'counts')
end
for name, lane in pairs(lanes) do
  flush('ZADD', P .. 'wait:' .. name, lane)
  open_lane(name)
end
return table.concat(words, ' ')
