-- @include core/alike
-- @include core/hooks
-- Transitions of jobs between states. Invariants of all scripts:
-- * Checks come before the first write, since Lua has no rollback; and the first write is a removal. A server at
--   maxmemory rejects a script whose first write adds data, but not after a removal. Only submissions may be rejected.
-- * detach() is the only way out of queued, delayed and running: it removes a job from every set that its state keeps
--   it in. Only pull removes jobs from lanes without it.
-- * The end of a job is final: finish() is called for jobs in one of ACTIVE's states, and writes all of the end.
-- * Only the holder of a job's latest token changes it while it runs (fenced.lua); other scripts request its end, or
--   wait until its lease has lapsed.
-- * A pull writes its leases, counts and turns at its end, for all jobs together.
-- * `charged` is written only once: a job counts when it first starts, not at later pulls, and is settled at its end.
-- * No call ends more than MAX_ENDS jobs or takes more than a few milliseconds: the rest waits for the next call.
local DAY = 86400000
local BATCH_TTL = 7 * DAY
local DEAD_TTL = 14 * DAY
local HISTORY = 32
local MAX_ENDS = 128
local ends = 0
local CANCELLED = '{"code":"cancelled","message":"the job was cancelled","retryable":false}'
local EXPIRED = '{"code":"deadline_exceeded","message":"the deadline passed","retryable":false}'
local CRASHED = '{"code":"crash_suspect","message":"5 workers died while they ran this job","retryable":false}'
local LOST_PAYLOAD = '{"code":"invalid_job","message":"the payload is gone from the server","retryable":false}'
local ENDED = {cancelled = CANCELLED, expired = EXPIRED}
local ACTIVE = {queued = true, delayed = true, running = true}
local RECHECK = 30000 -- ms between two checks of a job that others wait for
-- In a call that ends several jobs: writes collected for all of them until its end. Alternating commands, keys and
-- values, and changes of counts by key and state.
local together

-- The job's hash as a table, or nil.
local function load(id)
  local flat = redis.call('HGETALL', P .. 'job:' .. id)
  if #flat == 0 then
    return nil
  end
  -- Preallocated for all fields: a table that grows is rehashed each time.
  local job = {state = nil, lane = nil, seq = nil, cost = nil, at = nil, batch = nil, worker = nil, token = nil, started_at = nil,
    attempt = nil, affinity = nil, progress = nil, progress_at = nil}
  for i = 1, #flat, 2 do
    job[flat[i]] = flat[i + 1]
  end
  return job
end

-- Write immediately, or together with the writes of the call's other jobs to that key.
local put = {}
function put.add(command, key, value)
  if not together then
    redis.call(command, key, value)
    return
  end
  local keys = together[command]
  local values = keys[key] or {}
  keys[key] = values
  values[#values + 1] = value
end

function put.unlink(key, other)
  if together then
    together.gone[#together.gone + 1] = key
    together.gone[#together.gone + 1] = other
  else
    redis.call('UNLINK', key, other)
  end
end

local count
do
  local function add(key, state, by)
    if not together then
      redis.call('HINCRBY', key, state, by)
      return
    end
    local changes = together.counts[key] or {}
    together.counts[key] = changes
    changes[state] = (changes[state] or 0) + by
  end

  function count(batch, from, to)
    add(P .. 'counts', from, -1)
    add(P .. 'counts', to, 1)
    if batch then
      add(P .. 'batch:' .. batch, from, -1)
      add(P .. 'batch:' .. batch, to, 1)
    end
  end
end

-- Delete an empty lane. Its tenant stays in the turns until it would be next: a tenant that submits one job at a time
-- must not become new each time.
local function close_lane(lane)
  if redis.call('EXISTS', P .. 'wait:' .. lane) == 1 then
    return
  end
  redis.call('SREM', P .. 'lanes', lane)
  redis.call('HDEL', P .. 'overtaken', lane)
  redis.call('UNLINK', alike_key(lane))
  local needs, class, _, model = split_lane(lane)
  local turns = turns_key(needs, class, model)
  local tenants = redis.call('ZRANGE', turns, 0, 15)
  for _, tenant in ipairs(tenants) do
    if redis.call('EXISTS', P .. 'wait:' .. lane_name(needs, class, tenant, model)) == 1 then
      return
    end
    redis.call('ZREM', turns, tenant)
  end
  if #tenants < 16 then
    redis.call('ZREM', needs_key(model), class .. ':' .. needs)
  end
end

local has_suspects -- as read in this call

-- Remove the job from every set that its state keeps it in.
local function detach(id, job)
  if together and ends > 1 then
    put.add('ZREM', P .. 'leases', id)
  else
    redis.call('ZREM', P .. 'leases', id) -- immediately: afterwards a server at maxmemory accepts the later writes
  end
  if job.state == 'queued' and job.leader then
    redis.call('ZREM', P .. 'followers:' .. job.leader, id)
    redis.call('HINCRBY', P .. 'meta', 'followers', -1)
  elseif job.state == 'queued' then
    -- Found by its rank, which is unique: until the job is pulled, its affinity is known only in the lane.
    local lane = waiting_lane(job.lane, job.crashes)
    local name = redis.call('ZRANGEBYSCORE', P .. 'wait:' .. lane, job.seq, job.seq)[1]
    if name then
      local _, affinity = split_member(name)
      job.affinity = job.affinity or (not job.near and affinity or nil)
      redis.call('ZREM', P .. 'wait:' .. lane, name)
      remove_alike(lane, affinity, job.seq)
    end
    close_lane(lane)
  elseif job.state == 'delayed' then
    redis.call('ZREM', P .. 'delayed', id)
    redis.call('ZREM', P .. 'retrying', id)
    call_all(on_leave, id, job)
  elseif job.worker then
    call_all(on_stop, id, job)
    if has_suspects == nil then
      has_suspects = redis.call('EXISTS', P .. 'suspects') == 1
    end
    if has_suspects and redis.call('HGET', P .. 'suspects', job.worker) == id then
      redis.call('HDEL', P .. 'suspects', job.worker)
    end
  end
end

local function enqueue(id, job)
  detach(id, job)
  call_all(on_return, id, job)
  local lane = waiting_lane(job.lane, job.crashes)
  redis.call('ZADD', P .. 'wait:' .. lane, job.seq, member(id, job.near or job.affinity))
  add_alike(lane, job.near or job.affinity, job.seq)
  open_lane(lane)
  redis.call('HSET', P .. 'job:' .. id, 'state', 'queued', 'queued_at', NOW_TEXT)
  count(job.batch, job.state, 'queued')
end

-- Record an execution that did not end its job, since the next execution overwrites the job's record. Jobs without
-- interruption have no history: their record is complete. Call only after a removal.
local function remember(id, job, kind, code, message)
  redis.call('RPUSH', P .. 'history:' .. id, cjson.encode({
    kind = kind, at = int(NOW), started_at = job.started_at, worker = job.worker, attempt = job.attempt,
    queued_at = job.queued_at, saved_at = job.progress_at, spent = job.spent,
    code = code, message = message and string.sub(message, 1, 400)
  }))
  redis.call('LTRIM', P .. 'history:' .. id, -HISTORY, -1)
  if kind == 'retried' or kind == 'crashed' then
    call_all(on_failure, id, job, kind, code)
  end
end

-- A worker that sweeps deletes the stored object after the time `at`.
local function drop_stored(at, uri)
  if uri then
    redis.call('ZADD', P .. 'stored', int(at), uri)
  end
end

-- Duplicate jobs share one stored end, and so do the children of a job its output. `sharers:<name>` counts those that
-- will release it explicitly, and holds the time until which the others need it, whose records expire automatically.
local function share_of_end(name)
  if redis.call('HINCRBY', P .. 'sharers:' .. name, 'count', 1) == 1 then
    local left = redis.call('PTTL', P .. 'end:' .. name)
    if left > 0 then
      redis.call('HSET', P .. 'sharers:' .. name, 'until', int(NOW + left))
      redis.call('SET', P .. 'end:' .. name, redis.call('GET', P .. 'end:' .. name)) -- no expiry while it is shared
    end
  end
end

local function let_go_of_end(name, until_ms)
  local key = P .. 'sharers:' .. name
  local last = math.max(until_ms or 0, tonumber(redis.call('HGET', key, 'until') or 0))
  if redis.call('HINCRBY', key, 'count', -1) > 0 then
    redis.call('HSET', key, 'until', int(last))
    return
  end
  local uri = redis.call('HGET', key, 'stored')
  redis.call('UNLINK', key)
  drop_stored(math.max(last, NOW), uri)
  if last > NOW then
    redis.call('PEXPIRE', P .. 'end:' .. name, int(last - NOW))
  else
    redis.call('UNLINK', P .. 'end:' .. name)
  end
end

-- Release a job's input, now or together with its record at `until_ms`.
local function let_go_of_outputs(job, until_ms)
  for name in string.gmatch(job.given or '', '%S+') do
    let_go_of_end(name, until_ms)
  end
end

local function erase(id)
  local job = redis.call('HMGET', P .. 'job:' .. id, 'shared', 'batch', 'stored', 'stored_result', 'given')
  redis.call('UNLINK', P .. 'job:' .. id, P .. 'in:' .. id, P .. 'out:' .. id, P .. 'ckpt:' .. id, P .. 'md:' .. id,
    P .. 'history:' .. id)
  redis.call('ZREM', P .. 'dead', id)
  drop_stored(NOW, job[3])
  drop_stored(NOW, job[4])
  if job[2] then
    if job[1] then
      let_go_of_end(job[1])
    end
    let_go_of_outputs({given = job[5]})
  end
end

-- Whether a webhook or a relay has not been notified of the end yet.
local function owes_notice(id)
  local job = redis.call('HMGET', P .. 'job:' .. id, 'webhook', 'relay')
  return (job[1] and redis.call('ZRANK', P .. 'outbox', id))
    or (job[2] and redis.call('ZRANK', P .. 'outbox:' .. job[2], id)) or false
end

-- Delete an ended job that no client needs any more, immediately or after the last notification of its end.
local function forget(id)
  if owes_notice(id) then
    redis.call('ZREM', P .. 'dead', id)
    redis.call('HSET', P .. 'job:' .. id, 'acked', 1)
  else
    erase(id)
  end
end

-- Batches in which a job has ended in this call: their expiry is extended and their waiters are notified.
local told_batches = {}

local function record_ttl(state)
  return state == 'dead' and DEAD_TTL or DAY
end

local function expire_record(id, ttl, has_no_input)
  local kinds, until_then = {'job:', 'out:', 'md:', 'history:', 'in:', 'ckpt:'}, int(ttl)
  for i = 1, has_no_input and 4 or 6 do
    redis.call('PEXPIRE', P .. kinds[i] .. id, until_then)
  end
end

-- Set how long the record of an ended job is kept. A batch keeps its jobs until it expires as a whole. A job with a
-- pending notification is kept until that was sent, up to a week.
local function keep(id, job, state)
  if state == 'succeeded' then
    put.unlink(P .. 'ckpt:' .. id, P .. (job.keep and 'ckpt:' or 'in:') .. id)
    if job.stored and not job.keep then
      drop_stored(NOW, job.stored)
      redis.call('HDEL', P .. 'job:' .. id, 'stored')
      job.stored = nil
    end
    if job.given and not job.keep then
      let_go_of_outputs(job)
      redis.call('HDEL', P .. 'job:' .. id, 'given')
      job.given = nil
    end
  end
  if job.batch then
    put.add('RPUSH', P .. 'bfeed:' .. job.batch, id)
    if not told_batches[job.batch] then
      redis.call('ZADD', P .. 'bexpiry', int(NOW + BATCH_TTL), job.batch)
    end
    return
  end
  local ttl = record_ttl(state)
  if job.webhook or job.relay then
    ttl = math.max(ttl, BATCH_TTL)
  end
  expire_record(id, ttl, state == 'succeeded' and not job.keep)
  drop_stored(NOW + ttl, job.stored)
  drop_stored(NOW + ttl, job.stored_result)
  if job.shared then
    let_go_of_end(job.shared, NOW + ttl)
  end
  let_go_of_outputs(job, NOW + ttl)
end

-- After success the key keeps answering for its job; any other end frees the key.
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

-- Tokens and device time of the last execution, as reported by its worker in the commit (`job.used`). If no worker
-- wrote the end, or the values are implausible, the values of its status, up to the same limits. Duplicates use
-- nothing.
local MAX_USED_TOKENS = 100000000
local MAX_USED_MS = 10000000000 -- of all devices together: 116 days
local function used_by(job)
  if job.leader then
    return '0 0 0 0'
  end
  local used = job.used or ''
  local input, cached, output, device = string.match(string.sub(used, 1, 64), '^(%d+) (%d+) (%d+) (%d+)$')
  if input then
    input, cached, output, device = tonumber(input), tonumber(cached), tonumber(output), tonumber(device)
    if input <= MAX_USED_TOKENS and cached <= input and output <= MAX_USED_TOKENS and device <= MAX_USED_MS then
      return used
    end
  end
  input, output = string.match(job.progress or '', '^%a+ (%d+) %d+ (%d+)')
  return string.format('%.0f 0 %.0f 0', math.min(tonumber(input or 0), MAX_USED_TOKENS),
    math.min(tonumber(output or 0), MAX_USED_TOKENS))
end

-- Add a pending notification of the end. Ids that no client claims outlive their records, so each call removes two.
local function owe_notice(box, id)
  redis.call('ZADD', box, int(NOW), id)
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', box, '-inf', int(NOW - DEAD_TTL), 'LIMIT', 0, 2)) do
    if redis.call('EXISTS', P .. 'job:' .. old) == 1 then
      redis.call('ZADD', box, int(NOW), old)
    else
      redis.call('ZREM', box, old)
    end
  end
end

-- Remove a job from all sets of active jobs, and record its end. `out` is nil if the end is shared.
local function record_end(id, job, state, out)
  ends = ends + 1
  detach(id, job)
  if job.deadline then
    redis.call('ZREM', P .. 'deadlines', id)
  end
  if job.ending or job.due_at or job.waits then
    redis.call('HDEL', P .. 'job:' .. id, 'ending', 'due_at', 'waits')
  end
  local fields = {'state', state, 'finished_at', NOW_TEXT}
  if job.progress then
    fields[5], fields[6], fields[7], fields[8] = 'progress', job.progress, 'progress_at', job.progress_at
  end
  if job.spent then
    fields[#fields + 1], fields[#fields + 2] = 'spent', job.spent
  elseif job.state == 'delayed' then
    fields[#fields + 1], fields[#fields + 2] = 'queued_at', NOW_TEXT -- it never reached its lane
  end
  redis.call('HSET', P .. 'job:' .. id, unpack(fields))
  count(job.batch, job.state, state)
  if job.stored_result then
    redis.call('HSET', P .. 'job:' .. id, 'stored_result', job.stored_result)
  end
  if out then
    redis.call('SET', P .. 'out:' .. id, out)
  else
    redis.call('HSET', P .. 'job:' .. id, 'shared', job.shared)
    redis.call('UNLINK', P .. 'out:' .. id)
  end
  if state == 'dead' then
    redis.call('ZADD', P .. 'dead', int(NOW), id)
  end
  if job.webhook then
    owe_notice(P .. 'outbox', id)
  end
  if job.relay then
    owe_notice(P .. 'outbox:' .. job.relay, id)
  end
  if job.idem then
    settle_idempotency(id, job, state)
  end
  call_all(on_end, id, job, state, out)
  keep(id, job, state)
  redis.call('PUBLISH', P .. 'ended', id)
  if job.batch and not told_batches[job.batch] then
    told_batches[job.batch] = true
    redis.call('PUBLISH', P .. 'ended', 'batch:' .. job.batch)
  end
  if job.stream then
    redis.call('PUBLISH', P .. 'feed', id)
  end
  call_all(after_end, id, job, state, out)
end

-- The first duplicate runs at its own rank instead of the ended primary job; the others wait for it.
local function promote(followers)
  ends = ends + #followers / 8
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

-- Give duplicates the end of their primary job, up to the limit of one script: sweep continues with the others.
local function settle_followers(leader)
  local flat = redis.call('HGETALL', P .. 'settling:' .. leader)
  local given = {}
  for i = 1, #flat, 2 do
    given[flat[i]] = flat[i + 1]
  end
  local followers = {}
  if ends < MAX_ENDS then
    followers = redis.call('ZRANGE', P .. 'followers:' .. leader, 0, MAX_ENDS - ends - 1)
  end
  for _, id in ipairs(followers) do
    local job = load(id)
    job.progress, job.progress_at, job.shared = given.progress, given.progress_at, given.shared
    record_end(id, job, given.state, nil)
  end
  if redis.call('EXISTS', P .. 'followers:' .. leader) == 0 then
    redis.call('UNLINK', P .. 'settling:' .. leader)
    redis.call('ZREM', P .. 'settling', leader)
  else
    ring(given.model)
  end
end

-- Success depends only on the work, and so does death (the same work would crash five more workers): duplicates share
-- both, in one copy.
local function share_end(id, job, state, out, followers)
  -- A removal before the first write: see the top.
  redis.call('ZREM', P .. 'leases', id)
  local _, _, _, model = split_lane(job.lane)
  job.shared = id .. ':' .. int(NOW)
  redis.call('SET', P .. 'end:' .. job.shared, out)
  redis.call('HSET', P .. 'sharers:' .. job.shared, 'count', 1 + followers)
  if job.stored_result then
    redis.call('HSET', P .. 'sharers:' .. job.shared, 'stored', job.stored_result)
    job.stored_result = nil
  end
  redis.call('HSET', P .. 'settling:' .. id, 'shared', job.shared, 'state', state, 'model', model)
  if job.progress then
    redis.call('HSET', P .. 'settling:' .. id, 'progress', job.progress, 'progress_at', job.progress_at)
  end
  redis.call('ZADD', P .. 'settling', int(NOW), id)
  record_end(id, job, state, nil)
  settle_followers(id)
end

-- End a job. A terminal state is final.
local function finish(id, job, state, out)
  local is_shared = state == 'succeeded' or state == 'dead'
  local followers = {}
  if job.leader then
    local shared = redis.call('HGET', P .. 'settling:' .. job.leader, 'shared')
    if shared then
      let_go_of_end(shared)
    end
  elseif job.twin then
    followers = redis.call('ZRANGE', P .. 'followers:' .. id, 0, -1)
    if redis.call('GET', P .. 'twin:' .. job.twin) == id then
      redis.call('UNLINK', P .. 'twin:' .. job.twin)
    end
  end
  if is_shared and #followers > 0 then
    share_end(id, job, state, out, #followers)
    return
  end
  record_end(id, job, state, out)
  if #followers > 0 then
    -- A cancellation, a deadline or an error of the job itself ended only the primary job.
    redis.call('UNLINK', P .. 'followers:' .. id)
    promote(followers)
  end
end

-- A deadline applies to every reader, even if no live worker sweeps.
local function expire_if_late(id)
  local found = redis.call('HMGET', P .. 'job:' .. id, 'state', 'deadline')
  if ends < MAX_ENDS and (found[1] == 'queued' or found[1] == 'delayed') and found[2] and tonumber(found[2]) <= NOW then
    finish(id, load(id), 'expired', EXPIRED)
  end
end

-- Request the end of a running job: its worker receives it on the channel, or with its next renewal.
local function ask_to_end(id, state)
  redis.call('HSET', P .. 'job:' .. id, 'ending', state)
  redis.call('PUBLISH', P .. 'cancel', id)
end
-- @hooks on_end
-- @level
