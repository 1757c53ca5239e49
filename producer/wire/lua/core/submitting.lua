-- @include core/room
-- @include core/hooks
-- @include core/fields
-- @hooks on_submit
-- @include core/purged
-- @include core/owners
local MAX_PAYLOAD = 1049600
local MAX_FOLLOWERS = 256
local MAX_WAITERS = 1024 -- bytes of a job's waiter names
local lanes, tenants = {}, {}

-- Whether a key belongs to the tenant, so that tenants cannot reach each other's jobs by key.
local function is_own(name, tenant)
  return not name or string.sub(name, 1, #tenant + 1) == tenant .. ':'
end

-- Check everything before the first write: Lua has no rollback.
local function is_sound(job)
  for name, value in pairs(job) do
    local kind = type(value)
    if kind == 'string' then
      if #value > (LONGEST[name] or -1) then
        return false
      end
    elseif kind ~= 'number' or not (value >= 0 and value <= (LARGEST[name] or -1)) then
      return false
    end
  end
  if not (job.id and job.lane and job.cost) or string.find(job.id, '[^%w._-]') or job.id == '' then
    return false
  end
  if not lanes[job.lane] then
    local tenant = string.match(job.lane, '^%d+[+%w_]*:[012]:([%w._@-]+):.+$')
    if not tenant then
      return false
    end
    lanes[job.lane], tenants[job.lane] = {}, tenant
  end
  local tenant = tenants[job.lane]
  for _, hook in ipairs(on_check) do
    if not hook(job) then
      return false
    end
  end
  return is_own(job.idem, tenant) and is_own(job.twin, tenant) and (ARGV[1] ~= '' or not job.invalid)
    and (not job.affinity or string.match(job.affinity, '^%w+$'))
    and (not job.api_key or string.match(job.api_key, '^[%w._@-]+$'))
    and (not job.relay or string.match(job.relay, '^%l+$'))
    and (not job.waiters or string.match(job.waiters, '^%w+$'))
end

-- The header that clients write for a row of a bulk submission. This pattern reads it in a third of the time that cjson
-- takes, and checks lengths only; the part after the key that rows share is decoded and checked once.
local ROW = '^{"id":"([%w._-]+)","lane":"([%w._@:/+#~-]+)","cost":([1-9]%d*),()'
local KEY = '^"key":"([^"\\%c]*)"(.*)}$'
local common = {} -- by lane and those members: the decoded members

-- A header's job if it is a row's header; otherwise nil and the key of its members in `common`.
local function read_row(header)
  local id, lane, cost, at = string.match(header, ROW)
  if not id then
    return nil
  end
  local affinity, behind = string.match(header, '^"affinity":"(%w+)",()', at)
  at = behind or at
  local work
  work, behind = string.match(header, '^"work":"(%w+)",()', at)
  local key, rest = string.match(header, KEY, behind or at)
  local found = key and common[lane .. rest]
  if not found or #id > LONGEST.id or #cost > 15 or #key > LONGEST.key or #(affinity or '') > LONGEST.affinity
    or #(work or '') > LONGEST.work then
    return nil, key and lane .. rest, rest
  end
  local job = {id = id, lane = lane, cost = cost, affinity = affinity, work = work, key = key}
  for name, value in pairs(found) do
    job[name] = value
  end
  return job
end

-- The same for any header; nil if it is invalid.
local function read_header(header)
  local job, kind, rest = read_row(header)
  if job then
    return job
  end
  local read
  read, job = pcall(cjson.decode, header)
  if not read or type(job) ~= 'table' or not is_sound(job) then
    return nil
  elseif kind then
    local is_list, members = pcall(cjson.decode, '{' .. string.sub(rest, 2) .. '}')
    common[kind] = is_list and members or nil
  end
  return job
end

local jobs, names, words = {}, {}, {}
for i = 3, #ARGV, 2 do
  local job = read_header(ARGV[i])
  if not job or not ARGV[i + 1] then
    return redis.error_reply('PAGEMILL bad header at ARGV ' .. i)
  end
  job.payload = ARGV[i + 1]
  jobs[#jobs + 1] = job
  names[#names + 1] = P .. 'job:' .. job.id
end

-- Usually every id is new, which one check of all of them shows.
local some_exist = false
for i = 1, #names, 500 do
  some_exist = some_exist or redis.call('EXISTS', unpack(names, i, math.min(i + 499, #names))) > 0
end

local batch = ARGV[1] ~= '' and ARGV[1] or nil
local meta = redis.call('HMGET', P .. 'meta', 'limit', 'max_payload', 'memory_looked', 'purging')
local depth = redis.call('HMGET', P .. 'counts', 'queued', 'delayed')
local room = tonumber(meta[1] or ARGV[2]) - (depth[1] or 0) - (depth[2] or 0)
local max_payload, max_whole = math.min(MAX_PAYLOAD, tonumber(meta[2] or MAX_PAYLOAD)), tonumber(meta[2])
local memory, taken, no_memory = memory_room(meta[3]), 0, 0
local purged = purged_tenants(meta[4])
local has_acked = batch and redis.call('EXISTS', P .. 'backed:' .. batch) == 1
local ACTIVE = {queued = true, delayed = true, running = true}
local seq
local is_new, members, strings, queued, delayed, failed = {}, {}, {}, 0, 0, 0

-- Collect arguments per key and send a few hundred together: a call costs much more than an argument.
local function flush(args, command, key)
  if #args > 0 and key then
    redis.call(command, key, unpack(args))
  elseif #args > 0 then
    redis.call(command, unpack(args))
  end
  return {}
end

local function set(name, value)
  strings[#strings + 1] = P .. name
  strings[#strings + 1] = value
  if #strings >= 1000 then
    strings = flush(strings, 'MSET')
  end
end

-- Whether a job may still succeed, by `state`, `ending` and `deadline`: no end was requested and its deadline has not
-- passed, whether or not its worker knows.
local function goes_on(found)
  return ACTIVE[found[1]] and not found[2] and tonumber(found[3] or math.huge) > NOW
end

-- Add a waiter to a job whose waiters are counted. If the waiter has no name, or there are too many, disconnecting
-- clients no longer end the job. The removal comes first, so that the later writes pass at maxmemory.
local function join_waiters(id, waiter)
  local key = P .. 'job:' .. id
  local there = redis.call('HGET', key, 'waiters')
  if there and not string.find(' ' .. there .. ' ', ' ' .. (waiter or '-') .. ' ', 1, true) then
    redis.call('HDEL', key, 'waiters')
    if waiter and #there + #waiter < MAX_WAITERS then
      redis.call('HSET', key, 'waiters', there .. ' ' .. waiter)
    end
  end
end

-- The reply word for the job that already holds the idempotency key, or nil.
local function holder(job)
  local other = redis.call('GET', P .. 'idem:' .. job.idem)
  local found = other and redis.call('HMGET', P .. 'job:' .. other, 'state', 'ending', 'deadline', 'digest')
  if not found or not (goes_on(found) or found[1] == 'succeeded') then
    return nil
  elseif found[4] ~= job.digest then
    return 'conflict:' .. other
  end
  join_waiters(other, job.waiters)
  return 'same:' .. other
end

-- A dead job can be replayed once; again only if the replay was cancelled, expired or failed.
local function earlier_replay(job)
  local found = redis.call('HMGET', P .. 'job:' .. job.replay_of, 'state', 'replayed_as')
  if found[1] ~= 'dead' then
    return 'gone'
  end
  local replay = found[2] and redis.call('HMGET', P .. 'job:' .. found[2], 'state', 'ending', 'deadline')
  if replay and (goes_on(replay) or replay[1] == 'succeeded' or replay[1] == 'dead') then
    return 'same:' .. found[2]
  end
end

-- A queue's own limit counts the full payload, even if a stub represents it.
local function whole_size(job)
  return tonumber(string.match(job.payload, '"size":(%d+)') or 0)
end

-- The approximate memory of a job.
local function size_of(job)
  return #job.payload + #(job.metadata or '') + 600
end

-- The reply word for a job whose id is known: an item of a batch may be different work under the same key.
local function stored_before(job, name)
  local work = job.work and redis.call('HGET', name, 'work')
  return work and work ~= job.work and 'conflict:' .. job.id or 'exists'
end

-- The reply word for a job that must not be stored; nil for a new one.
local function known(job, name)
  if is_new[job.id] or (some_exist and redis.call('EXISTS', name) == 1) then
    return stored_before(job, name)
  elseif has_acked and redis.call('SISMEMBER', P .. 'backed:' .. batch, job.id) == 1 then
    return 'exists'
  elseif purged[tenants[job.lane]] then
    return 'purging'
  end
  local word = (job.replay_of and earlier_replay(job)) or (job.idem and holder(job))
  if word then
    return word
  elseif #job.payload > max_payload or (max_whole and job.stored and whole_size(job) > max_whole) then
    return 'too_large'
  elseif room <= 0 then
    return 'full'
  elseif memory and memory < taken + size_of(job) then
    no_memory = no_memory + 1
    return 'memory'
  end
  for _, hook in ipairs(on_refuse) do
    word = word or hook(job, jobs, words)
  end
  return word
end

local function join_batch(id)
  members[#members + 1] = id
  if #members >= 500 then
    members = flush(members, 'RPUSH', P .. 'bjobs:' .. batch)
  end
end

local function class(lane)
  return string.match(lane, ':(%w)')
end

-- The equal job that this one may wait for: at least as urgent, or running. Without one, this is the primary job.
local function leader_of(job)
  local twin = P .. 'twin:' .. job.twin
  local leader = redis.call('GET', twin)
  local found = leader and redis.call('HMGET', P .. 'job:' .. leader, 'state', 'ending', 'deadline', 'lane')
  if found and goes_on(found) and (found[1] == 'running' or class(found[4]) <= class(job.lane))
    and redis.call('ZCARD', P .. 'followers:' .. leader) < MAX_FOLLOWERS then
    return leader
  end
  redis.call('SET', twin, job.id)
end

local function wait(job, rank)
  local lane = lanes[job.lane] or {}
  lanes[job.lane] = lane
  lane[#lane + 1] = rank
  lane[#lane + 1] = member(job.id, job.affinity)
  if #lane >= 500 then
    lanes[job.lane] = flush(lane, 'ZADD', P .. 'wait:' .. job.lane)
    open_lane(job.lane)
  end
end

-- One list for the records of all jobs: leftovers of an earlier job after its end are not sent.
local record = {'state', '', 'lane', '', 'seq', 0, 'cost', 0, 'at', int(NOW), batch and 'batch', batch}
local RECORD_LENGTH = batch and 12 or 10

local function store(job, name)
  seq = (seq or redis.call('HINCRBY', P .. 'meta', 'seq', #jobs) - #jobs) + 1
  room = room - 1
  call_all(on_submit, job, batch, seq)
  local length = RECORD_LENGTH
  record[2], record[4], record[6], record[8] = 'queued', job.lane, seq, job.cost
  local due = (job.run_at or job.delay) and math.max(job.run_at or 0, job.delay and NOW + job.delay or 0) or 0
  if job.deadline or job.ttl then
    local deadline = int(math.min(job.deadline or math.huge, job.ttl and NOW + job.ttl or math.huge))
    record[length + 1], record[length + 2] = 'deadline', deadline
    length = length + 2
    redis.call('ZADD', P .. 'deadlines', deadline, job.id)
  end
  if due > NOW then
    record[length + 1], record[length + 2] = 'due_at', int(due)
    length = length + 2
  end
  if due > NOW or job.waits then
    -- A job that waits anyway is neither a primary job nor a duplicate.
    job.twin = nil
    record[2] = 'delayed'
    redis.call('ZADD', P .. 'delayed', int(job.waits and HELD or due), job.id)
    delayed = delayed + 1
  else
    job.leader = job.twin and leader_of(job)
    queued = queued + 1
    if job.leader then
      redis.call('ZADD', P .. 'followers:' .. job.leader, seq, job.id)
      redis.call('HINCRBY', P .. 'meta', 'followers', 1)
    else
      wait(job, seq)
      -- The lane holds it. Records of waiting jobs must be small, since there may be a million of them.
      job.affinity = nil
    end
  end
  for field, value in pairs(job) do
    if is_optional[field] then
      record[length + 1], record[length + 2] = field, value
      length = length + 2
    end
  end
  if batch then
    join_batch(job.id)
  end
  redis.call('HSET', name, unpack(record, 1, length))
  set('in:' .. job.id, job.payload)
  if job.metadata then
    set('md:' .. job.id, job.metadata)
  end
  if job.idem then
    redis.call('SET', P .. 'idem:' .. job.idem, job.id)
  end
  if job.replay_of then
    redis.call('HSET', P .. 'job:' .. job.replay_of, 'replayed_as', job.id)
  end
end

-- Record an invalid row as a failed job of its batch, so that the counts add up to the number of rows.
local function record_invalid(job, name)
  redis.call('HSET', name, 'state', 'failed', 'lane', job.lane, 'at', NOW, 'finished_at', NOW, 'batch', batch,
    'key', job.key or '')
  if job.work then
    redis.call('HSET', name, 'work', job.work)
  end
  set('out:' .. job.id, job.invalid)
  if job.metadata then
    set('md:' .. job.id, job.metadata)
  end
  join_batch(job.id)
  redis.call('RPUSH', P .. 'bfeed:' .. batch, job.id)
  failed = failed + 1
end

for i, job in ipairs(jobs) do
  local word = known(job, names[i])
  if not word then
    word = 'created'
    is_new[job.id] = true
    if job.invalid then
      record_invalid(job, names[i])
    else
      store(job, names[i])
    end
    taken = memory and taken + size_of(job) or 0
  end
  if job.stored and word == 'created' then
    redis.call('ZREM', P .. 'stored', job.stored)
  elseif job.stored and (word == 'full' or word == 'memory' or word == 'purging') then
    redis.call('ZADD', P .. 'stored', 'XX', int(NOW + 3600000), job.stored) -- it will be sent again
  end
  words[i] = word
end

local function add(key)
  for state, number in pairs({queued = queued, delayed = delayed, failed = failed}) do
    if number > 0 then
      redis.call('HINCRBY', key, state, number)
    end
  end
end
flush(strings, 'MSET')
if taken + no_memory > 0 then
  book_memory(taken, no_memory)
end
if batch then
  redis.call('HSETNX', P .. 'batch:' .. batch, 'created_at', NOW)
  redis.call('HINCRBY', P .. 'batch:' .. batch, 'total', queued + delayed + failed)
  redis.call('ZADD', P .. 'bexpiry', int(NOW + 604800000), batch)
  add(P .. 'batch:' .. batch)
  flush(members, 'RPUSH', P .. 'bjobs:' .. batch)
  note_owner(batch, tenants)
end
add(P .. 'counts')
for name, lane in pairs(lanes) do
  if #lane > 0 then
    flush(lane, 'ZADD', P .. 'wait:' .. name)
    open_lane(name)
  end
end
local reply = {table.concat(words, ' ')}
call_all(after_submit, tenants, reply)
return table.concat(reply, '\n')
