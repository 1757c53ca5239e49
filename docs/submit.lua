-- Definitions that all scripts share. KEYS[1] is the queue's prefix `pagemill:{<queue>}:`; every other name is that
-- prefix and a word (producer/wire/schema/keys.py). Times are milliseconds by the server's clock.
local P = KEYS[1]
local clock = redis.call('TIME')
local NOW = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- The due time of a job that waits for others; it is never reached.
local HELD = 9e15

-- A whole number as text: tostring() would write 1.7e+12.
local function int(number)
  return string.format('%.0f', number)
end

local NOW_TEXT = int(NOW)

-- The waiting set of a job. After three crashes a job is a suspect (poison job), and suspects wait in a separate lane.
local function waiting_lane(lane, crashes)
  if tonumber(crashes or 0) >= 3 then
    return (string.gsub(lane, '^([^:]+):%w', '%1:s'))
  end
  return lane
end

-- The member for a job in its waiting set: it includes the affinity, so that pull reads both together.
local function member(id, affinity)
  return affinity and id .. ' ' .. affinity or id
end

-- The id, and the affinity or nil.
local function split_member(name)
  local id, affinity = string.match(name, '^(%S*) ?(%S*)$')
  return id, affinity ~= '' and affinity or nil
end

-- Takes the place of the affinity in a waiting set, for a job whose prefix that worker computed for its parent.
local function near_name(worker)
  local hash = 0
  for i = 1, #worker do
    hash = (hash * 31 + string.byte(worker, i)) % 1048573
  end
  return string.format('w%05x', hash)
end

local function split_lane(lane)
  return string.match(lane, '^([^:]+):(%w):([^:]+):(.+)$')
end

local function lane_name(needs, class, tenant, model)
  return needs .. ':' .. class .. ':' .. tenant .. ':' .. model
end

local function turns_key(needs, class, model)
  return P .. 'turns:' .. needs .. ':' .. class .. ':' .. model
end

-- The classes and needs of a model's waiting jobs, as `<class>:<needs>`, all scores 0: each has a `turns_key`. If one
-- is empty, the next pull that knows the words removes it here.
local function needs_key(model)
  return P .. 'needs:' .. model
end

-- Wake an idle worker. The list is capped and short-lived: it is only a hint, since workers also poll.
local function ring(model)
  local bell = P .. 'bell:' .. model
  redis.call('LPUSH', bell, '1')
  redis.call('LTRIM', bell, 0, 15)
  redis.call('PEXPIRE', bell, 60000)
end

local has_opened

-- Make a lane known to pull. A newly waiting tenant is level with the tenant that is next.
local function open_lane(lane)
  local needs, class, tenant, model = split_lane(lane)
  local turns = turns_key(needs, class, model)
  local first = redis.call('ZRANGE', turns, 0, 0, 'WITHSCORES')
  redis.call('SADD', P .. 'lanes', lane)
  redis.call('ZADD', needs_key(model), 0, class .. ':' .. needs)
  redis.call('ZADD', turns, 'NX', first[2] or '0', tenant)
  has_opened = true
  ring(model)
end
return (function()
-- Store and queue jobs.
-- KEYS[1] prefix `pagemill:{<queue>}:`
-- ARGV[1] batch id, or ''
-- ARGV[2] how many jobs may wait, unless the queue sets its own limit. Without further arguments: an empty batch.
-- ARGV[3], ARGV[4] and so on: header and payload of each job. The payload is the envelope, stored byte for byte. The
--   header is JSON: id, lane `<needs>:<class>:<tenant>:<model>` (needs 1, and `+<word>` for each word that a worker
--   must know; class 0 high, 1 normal, 2 low), cost (tokens); optional: delay, ttl (ms from now), run_at, deadline
--   (unix ms), max_attempts, n, width (concurrent sequences, if not n), stream (1), keep (1: the payload stays for as
--   long as the result), webhook (URL), relay (a lower-case word: the outbox for the end), affinity (a hash of the
--   prompt's prefix: equal ones are pulled together), twin `<tenant>:<digest>` (equal ones in flight run once), key
--   (the name inside the batch), idem `<tenant>:<idempotency key>`, digest (of the work), work (a hash of id and work:
--   other work under the id is a conflict), metadata (JSON text), replay_of (a dead job's id), invalid (an error as
--   JSON text: the row is not a job, and is recorded in its batch as failed), waiters (letters and digits: the client
--   that waits for it, see hang_up), stored (the URI of the payload, if this one is its stub), api_key (the name of the
--   gateway's key that it came with), uncounted (1: its usage is not counted), and fields of features.
-- Returns one word per job, separated by spaces: created | exists (this id was submitted before) | full (not stored) |
--   memory (the server has no free memory; not stored) | too_large (the payload; not stored) | same:<id> |
--   conflict:<id> (the idempotency key belongs to that id, with an equal or another digest; conflict also: this id was
--   submitted before, with another `work`; same also: replay_of was replayed as that id) | gone (replay_of is not a
--   dead job) | purging (the tenant's jobs are being removed; not stored). Features may add lines.
-- Free memory of the server. Submissions stop at a share of its maxmemory; the rest is for running jobs.
local MEMORY_SHARE = 0.85

-- {used, most}, in bytes, without memory that the server itself does not count; nil if there is no maxmemory, or the
-- server does not report it.
local function read_memory()
  local info = redis.pcall('INFO', 'memory')
  local most = type(info) == 'string' and tonumber(string.match(info, '\nmaxmemory:(%d+)') or 0) or 0
  if most > 0 then
    local used = tonumber(string.match(info, '\nused_memory:(%d+)') or 0)
    return {used - tonumber(string.match(info, 'mem_not_counted_for_evict:(%d+)') or 0), most}
  end
end
local LOOK_EVERY = 1000
-- With more free memory than this, submissions are not booked between two reads.
local PLENTY = 268435456

-- Bytes that may be added until the server's memory is read again, once per second; nil: no limit. `looked` is the
-- field `memory_looked`: until that time memory is plentiful.
local function memory_room(looked)
  local left = (looked or 0) - NOW
  if left > 0 and left <= LOOK_EVERY then
    return nil
  end
  local meta = redis.call('HMGET', P .. 'meta', 'memory_at', 'memory_room', 'memory_share')
  local age = NOW - (meta[1] or 0)
  if age >= 0 and age < LOOK_EVERY then
    return tonumber(meta[2])
  end
  local memory = read_memory()
  local room = memory and math.floor((meta[3] or MEMORY_SHARE) * memory[2] - memory[1])
  -- The removal comes first, so that the writes pass at maxmemory.
  redis.call('HDEL', P .. 'meta', 'memory_looked', 'memory_at', 'memory_room')
  if not room or room > PLENTY then
    redis.call('HSET', P .. 'meta', 'memory_looked', int(NOW + LOOK_EVERY))
    return nil
  end
  redis.call('HSET', P .. 'meta', 'memory_at', int(NOW), 'memory_room', int(room))
  return room
end

-- Book the bytes added, and the number of jobs rejected because memory ran out.
local function book_memory(bytes, refused)
  if bytes > 0 then
    redis.call('HINCRBY', P .. 'meta', 'memory_room', -bytes)
  end
  if refused > 0 then
    redis.call('HDEL', P .. 'meta', '') -- a removal, so that the later writes pass at maxmemory
    redis.call('HINCRBY', P .. 'meta', 'memory_rejections', refused)
  end
end
-- Hooks of features: by the time these lists are used, features have added their functions. A feature's file has a
-- section per place, which starts with a line `-- @hook <place>`. A line `-- @hooks <place>` includes the sections of
-- all features. Place on_submit:
local on_check = {} -- (job): whether its header is valid
local on_refuse = {} -- (job, jobs, words): the reply word for a job that must not be stored, or nil
local on_submit = {} -- (job, batch, rank): a job is about to be stored; may change its lane and its `waits`
local after_submit = {} -- (tenants, reply): all jobs are stored; may add lines to the reply
-- Place on_pull:
local given = {'crashes', 'deadline', 'lost_by', 'fingerprint'} -- fields of a job that its worker receives
local on_pull = {} -- (names): returns those of the names to pull from
local may_start = {} -- (job, lane, cost): a function that parks the lane if the job must not start, or nil
local on_start = {} -- (id, job, lane, cost): a job is given to a worker
local on_limited = {} -- (ms): the queue's rate limit lets no job start for that long
local on_due = {} -- (ms): returns in how many ms a pull may find more jobs, or -1
-- Place on_end:
local on_leave = {} -- (id, job): a delayed job stops waiting
local on_stop = {} -- (id, job): a job stops running, for any reason; may be called twice
local on_return = {} -- (id, job): a job is queued again; may change its lane
local on_failure = {} -- (id, job, kind, code): an execution was retried, with the code of its error, or crashed
local on_end = {} -- (id, job, state, out): a job ends; `out` is its result or error, or nil if duplicates share it
local after_end = {} -- the same, after all of its end is written
local on_flush = {} -- (): the end of the call: write what was collected for several jobs
-- Place on_sweep:
local on_sweep = {} -- (limit): called by each sweep
-- Place on_purge:
local on_purge = {} -- (id, job): a job is removed permanently

local function call_all(hooks, ...)
  for _, hook in ipairs(hooks) do
    hook(...)
  end
end
-- The header fields of a submission, with the maximum length of strings and the maximum of numbers; no number is below
-- 0, and NaN fails every comparison. Features add fields.
local LONGEST = {
  id = 64, lane = 640, affinity = 32, twin = 128, key = 1024, idem = 1100, digest = 64, replay_of = 64,
  webhook = 2048, relay = 32, metadata = 22528, invalid = 16384, waiters = 32, stored = 1024, api_key = 64, work = 64
}
local LARGEST = {
  cost = 1e15, delay = 1e12, ttl = 1e12, run_at = 1e15, deadline = 1e15, max_attempts = 100, n = 128, width = 128,
  stream = 1, keep = 1, uncounted = 1
}
-- Fields that are also stored in the job's record if the header has them.
local is_optional = {}
local function keep_fields(names)
  for name in string.gmatch(names, '%S+') do
    is_optional[name] = true
  end
end
keep_fields('max_attempts n width stream keep webhook relay affinity twin leader key idem digest replay_of waiters stored waits '
  .. 'side api_key uncounted work')
-- Estimates of a job's end (docs/queues.md), and their accuracy. A header's `estimate` is
-- `<now or later>:<from>:<estimate>:<p50>:<p90>`, in unix ms and ms from then.
LONGEST.estimate = 80
keep_fields('estimate')
on_check[#on_check + 1] = function(job)
  return not job.estimate or string.match(job.estimate, '^%l+:%d+:%d+:%d+:%d+$')
end

-- Chats that can be listed: `chats:<tenant>` has their ids by submission time. The id of a deleted chat stays, so that
-- the page after it can be found.
LARGEST.listed = 1
do
  local MAX_LISTED = 10000
  local LISTED_TTL = 8 * 86400000

  on_submit[#on_submit + 1] = function(job)
    if not job.listed then
      return
    end
    local _, _, tenant = split_lane(job.lane)
    local key = P .. 'chats:' .. tenant
    redis.call('ZADD', key, int(NOW), job.id)
    redis.call('ZREMRANGEBYSCORE', key, '-inf', int(NOW - LISTED_TTL))
    for _, id in ipairs(redis.call('ZRANGE', key, 0, -MAX_LISTED - 1)) do
      redis.call('ZREM', key, id)
    end
    redis.call('PEXPIRE', key, LISTED_TTL)
  end
end
-- Quotas of tenants, and the amounts spent: jobs count when they start; tokens count by the job's cost until it ends,
-- then by its usage. A quota per minute is a bucket that fills in a minute; a quota per day starts at 0:00 UTC. Created
-- on demand: a commit must not pay for functions that it does not call.
local function new_quotas()
  local quotas = {MINUTE = 60000, DAY = 86400000}
  local MINUTE, DAY_MS = quotas.MINUTE, quotas.DAY
  -- {tokens per minute, jobs per minute, tokens per day, jobs per day, concurrent jobs}, each false if unlimited; nil
  -- for a tenant without quotas.
  local seen = {}
  function quotas.of(tenant)
    local quota = seen[tenant]
    if quota == nil then
      local found = redis.call('HMGET', P .. 'quotas', tenant, '*')
      local text = found[1] or found[2]
      quota = false
      if text then
        quota = {}
        for part in string.gmatch(text, '%S+') do
          quota[#quota + 1] = tonumber(part) or false
        end
      end
      seen[tenant] = quota
    end
    return quota or nil
  end

  -- Return the four sums that a tenant has spent.
  function quotas.spent(tenant, quota)
    local found = redis.call('GET', P .. 'spent:' .. tenant) or ''
    local tokens, jobs, at, day, day_tokens, day_jobs = string.match(found, '^(%S+) (%S+) (%d+) (%d+) (%d+) (%d+)$')
    local spent = {0, 0, 0, 0}
    if tokens then
      -- If the clock was set back by more than a minute, that minute has passed.
      local passed = at - NOW > MINUTE and math.huge or math.max(0, NOW - at) / MINUTE
      spent[1] = quota[1] and math.max(0, tokens - passed * quota[1]) or 0
      spent[2] = quota[2] and math.max(0, jobs - passed * quota[2]) or 0
      if tonumber(day) == math.floor(NOW / DAY_MS) then
        spent[3], spent[4] = tonumber(day_tokens), tonumber(day_jobs)
      end
    end
    return spent
  end

  -- While there are quotas, `runs` has the running jobs, as `<tenant> <id>`.
  function quotas.running(tenant)
    return redis.call('ZLEXCOUNT', P .. 'runs', '[' .. tenant .. ' ', '(' .. tenant .. '!')
  end

  -- Whether a tenant has reached its limit of running jobs.
  function quotas.is_full(tenant)
    local quota = quotas.of(tenant)
    return quota and quota[5] and quotas.running(tenant) >= quota[5] or false
  end

  -- Return a tenant's quotas for a reply: its name, then for each of the five the limit, the remainder and the ms until
  -- it is full again; nil if it has no quotas.
  function quotas.line(tenant)
    local quota = quotas.of(tenant)
    if not quota then
      return nil
    end
    local spent, parts = quotas.spent(tenant, quota), {tenant}
    for i = 1, 4 do
      local limit = quota[i]
      local reset = limit and (i <= 2 and spent[i] / limit * MINUTE or DAY_MS - NOW % DAY_MS)
      parts[#parts + 1] = limit and string.format('%.0f %.0f %.0f', limit, math.max(0, math.floor(limit - spent[i])),
        spent[i] > 0 and math.ceil(reset) or 0) or '- - -'
    end
    parts[6] = quota[5] and string.format('%.0f %.0f 0', quota[5], math.max(0, quota[5] - quotas.running(tenant))) or '- - -'
    return table.concat(parts, ' ')
  end

  return quotas
end

local are_set -- as read in this call
local function has_quotas()
  if are_set == nil then
    are_set = redis.call('HGET', P .. 'meta', 'quotas') == '1'
  end
  return are_set
end

-- Add a line to the reply for each tenant with quotas: its name, then limit, remainder and ms until full, for tokens
-- per minute, jobs per minute, tokens per day, jobs per day and concurrent jobs; `-` if unlimited.
after_submit[#after_submit + 1] = function(tenants, reply)
  local quotas, told = has_quotas() and new_quotas(), {}
  for _, tenant in pairs(quotas and tenants or {}) do
    reply[#reply + 1] = not told[tenant] and quotas.line(tenant) or nil
    told[tenant] = true
  end
end

-- Whether the known words include all words of a lane's needs; both are joined by +.
local function knows(known, needs)
  for word in string.gmatch(needs, '[^+]+') do
    if not string.find('+' .. known .. '+', '+' .. word .. '+', 1, true) then
      return false
    end
  end
  return true
end

-- The same for the words in a live worker's record.
local function record_knows(info, needs)
  return knows(string.match(info or '', '"knows":"([^"]*)"') or '1', needs)
end
-- A rollout sends a share of a model's jobs to one revision, the canary. `rollouts` has per model `<open, halted, back
-- or ended> <share of 10,000> <id, tenant or batch> <the canary's revision>`, and `rollout:<model>` the counts of both
-- sides. A submission assigns each job to a side. The canary's jobs have `side` in their records and wait in the lane
-- of its revision, like jobs that name it; `canary:<model>` has those that have not ended, by rank. The rules are in
-- docs/rollouts.md.
local rollouts = {}
do
  -- The rollout of the model that the last part of a lane names, or false.
  local known = {}
  function rollouts.of(name)
    local model = string.match(name, '^[^#~]*')
    if known[model] == nil then
      local text = redis.call('HGET', P .. 'rollouts', model) or ''
      local state, share, by, to = string.match(text, '^(%l+) (%d+) (%l+) (%S+)$')
      known[model] = state and {model = model, state = state, share = tonumber(share), by = by, to = to} or false
    end
    return known[model]
  end

  function rollouts.live_workers(name)
    return redis.call('ZCOUNT', P .. 'serves:' .. name, int(NOW), '+inf')
  end

  -- Live workers of a name that do not serve the canary.
  function rollouts.num_stable(rollout, name)
    return rollouts.live_workers(name) - rollouts.live_workers(name .. '~' .. rollout.to)
  end

  function rollouts.is_taking(rollout, name)
    return rollout.state == 'open' and rollouts.live_workers(name .. '~' .. rollout.to) > 0
  end

  -- Whether a live worker of one side knows all words that the jobs of a lane need, whose base name is `name`. Reads up
  -- to MAX_READ workers.
  local MAX_READ = 64
  local able = {}
  function rollouts.is_able(rollout, lane, name, side)
    local needs, canary = split_lane(lane), P .. 'serves:' .. name .. '~' .. rollout.to
    local key = side .. ' ' .. needs .. ':' .. name
    if able[key] == nil then
      able[key] = needs == '1'
      local serving = side == 'canary' and canary or P .. 'serves:' .. name
      local ids = able[key] and {} or redis.call('ZRANGEBYSCORE', serving, int(NOW), '+inf', 'LIMIT', 0, MAX_READ)
      for _, id in ipairs(ids) do
        if side == 'canary' or not redis.call('ZRANK', canary, id) then
          able[key] = able[key] or record_knows(redis.call('GET', P .. 'worker:' .. id), needs)
        end
      end
    end
    return able[key]
  end

  -- Whether the canary may receive jobs of a lane.
  function rollouts.is_taking_from(rollout, lane, name)
    return rollouts.is_taking(rollout, name) and rollouts.is_able(rollout, lane, name, 'canary')
  end

  -- Remove a job that has ended. Returns its model.
  function rollouts.forget(id, job)
    local model = string.match(job.lane, '^[^:]+:%w:[^:]+:([^#~]*)')
    if job.side then
      redis.call('ZREM', P .. 'canary:' .. model, id)
    end
    return model
  end

  -- Return jobs of a canary that does not accept them to the other workers; a running job moves when it waits again.
  -- Only scripts that include states.lua call it. Returns how many jobs are left.
  function rollouts.move_back(rollout, limit)
    local key = P .. 'canary:' .. rollout.model
    local first = 0
    if rollout.state == 'open' then
      first = NOW % math.max(1, redis.call('ZCARD', key) - limit + 1) -- it may accept jobs of only some adapters
    end
    for _, id in ipairs(redis.call('ZRANGE', key, first, first + limit - 1)) do
      local job = load(id)
      local name = job and string.match(job.lane, '^[^:]+:%w:[^:]+:([^~]*)')
      if not job or not rollouts.is_taking_from(rollout, job.lane, name) then
        redis.call('ZREM', key, id)
        if job and job.state == 'queued' and not job.leader then
          enqueue(id, job)
        end
      end
    end
    return redis.call('ZCARD', key)
  end
end

do
  local SHARES = 10000
  local by_lane = {} -- the rollout whose canary takes jobs of a lane, or false; cached for calls with thousands of jobs

  on_submit[#on_submit + 1] = function(job, batch, rank)
    local rollout = by_lane[job.lane]
    if rollout == false then
      return
    end
    local _, _, tenant, name = split_lane(job.lane)
    if rollout == nil then
      rollout = not string.find(name, '~', 1, true) and rollouts.of(name)
      rollout = rollout and rollouts.is_taking_from(rollout, job.lane, name) and rollout
      by_lane[job.lane] = rollout
      if not rollout then
        return
      end
    end
    local decides = (rollout.by == 'tenant' and tenant) or (rollout.by == 'batch' and batch) or job.id
    local point = tonumber(string.sub(redis.sha1hex(rollout.to .. ' ' .. decides), 1, 8), 16) % SHARES
    -- Jobs that only the canary's workers know, for example with a new field, are its own regardless of the share.
    if point < rollout.share
      or (not rollouts.is_able(rollout, job.lane, name, 'stable') and rollouts.num_stable(rollout, name) > 0) then
      job.side, job.lane = 'canary', job.lane .. '~' .. rollout.to
      redis.call('ZADD', P .. 'canary:' .. rollout.model, rank, job.id)
    end
  end
end

-- Tenants whose jobs and files are being removed (purge_fence.lua): meanwhile new ones are rejected. The field
-- `purging` of `meta` has their names, each with the time at which its fence ends. Times beyond the longest fence mean
-- that the clock was set back.
local LONGEST_FENCE = 600000
local function purged_tenants(text)
  local found = {}
  for tenant, falls_at in string.gmatch(text or '', '(%S+) (%d+)') do
    local left = falls_at - NOW
    found[tenant] = left > 0 and left <= LONGEST_FENCE and falls_at or nil
  end
  return found
end

local function is_purged(tenant)
  return purged_tenants(redis.call('HGET', P .. 'meta', 'purging'))[tenant]
end
-- The owner of a batch: `bowner:<batch>` is the tenant of all of its jobs, or * if several tenants have jobs in it.
local OWNER_TTL = 2592000000

local function note_owner(batch, tenants)
  local owner
  for _, tenant in pairs(tenants) do
    owner = (not owner or owner == tenant) and tenant or '*'
  end
  local key = P .. 'bowner:' .. batch
  local known = redis.call('GET', key)
  if owner and known ~= owner and known ~= '*' then
    redis.call('SET', key, known and '*' or owner, 'PX', OWNER_TTL)
  end
end
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
end)()
