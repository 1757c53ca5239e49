-- @include core/room
-- @include core/hooks
-- Jobs that wait for other jobs. A record's `after` has the ids of all parents of a job, `waits` those whose end it has
-- not received yet; `children:<id>` has the jobs to notify of an end, and `awaited` the jobs that have children. The
-- end of a job notifies up to MAX_TOLD of them. A sweep continues with the others, and with ends recorded by a script
-- of an earlier release, which does not know dependents.
local MAX_TOLD = 64
local MAX_READ = 1048576 -- bytes of results and outputs that sweep and submit read, exceeded by one at most
local MAX_RESULT = 1048576 -- bytes of a result that is decoded here
local MAX_OUTPUTS = 262144 -- bytes of the outputs that one job reads
local TOKEN_BYTES = 3
local MAX_COMPARED = 4096 -- bytes of a text that conditions compare
local ALLOCATED = 1.25 -- an allocator's size classes differ by up to a quarter
local tell_children, leave_parents, given_by
local told, bytes_read = 0, 0

local function plain(value, kind)
  return type(value) == kind and value or nil
end

-- Return the values that an ended job passes to its children: its state, the code of its error, and of its first output
-- text, label and the label's probability.
function given_by(id, job, state, outcome)
  local given = {id = id, state = state, worker = job.worker, affinity = job.affinity}
  local read, found = false, nil
  if outcome and #outcome <= MAX_RESULT then
    bytes_read = bytes_read + #outcome
    read, found = pcall(cjson.decode, outcome)
  end
  if not read or type(found) ~= 'table' or (state == 'succeeded' and found.stored) then
    given.unreadable = state == 'succeeded'
    given.is_removed = given.unreadable and not outcome
  elseif state == 'succeeded' and plain(found.sealed, 'string') then
    -- Encrypted: only its readers can decrypt it, and no condition can be evaluated.
    given.sealed, given.computed_by = outcome, job.leader or id
  elseif state ~= 'succeeded' then
    given.code = plain(found.code, 'string')
  else
    local output = type(found.outputs) == 'table' and plain(found.outputs[1], 'table') or {}
    given.text, given.label = plain(output.text, 'string') or '', plain(output.label, 'string')
    if given.label and type(output.label_probs) == 'table' then
      -- As text, since cjson writes 14 digits.
      given.prob = string.format('%.17g', plain(output.label_probs[given.label], 'number') or 0)
    end
  end
  return given
end

-- A pattern that trims both ends would take quadratic time.
local function trimmed(text)
  local last = #text
  while last > 0 and string.find(text, '^%s', last) do
    last = last - 1
  end
  return string.match(string.sub(text, 1, last), '^%s*(.*)$')
end

local function is_one_of(values, text)
  if #text > MAX_COMPARED then
    return false
  end
  text = trimmed(text)
  for _, value in ipairs(values) do
    if value == text then
      return true
    end
  end
  return false
end

-- Whether a condition holds: label and text (lists; without label, the text is compared), prob_at_least, prob_below.
local function is_met(condition, given)
  local prob = tonumber(given.prob)
  return given.state == 'succeeded' and not given.unreadable
    and (not condition.label or is_one_of(condition.label, given.label or given.text))
    and (not condition.text or is_one_of(condition.text, given.text))
    and (not condition.prob_at_least or (prob ~= nil and prob >= condition.prob_at_least))
    and (not condition.prob_below or (prob ~= nil and prob < condition.prob_below))
end

local function error_of(code, message, cause)
  return cjson.encode({code = code, message = message, cause = cause, retryable = false})
end

-- The end and the error of a job that must not run because of how its parent ended; nil otherwise.
local function verdict(job, given)
  local read, when = pcall(cjson.decode, job.when or '{}')
  local condition = read and when[given.id]
  if given.state ~= 'succeeded' and job.otherwise ~= 'run' then
    local how = given.state == 'gone' and 'is gone' or 'is ' .. given.state
    return 'cancelled', error_of('parent_failed', 'it waited for job ' .. given.id .. ', which ' .. how, given.code)
  elseif given.sealed and condition then
    return 'failed', error_of('unsupported_feature', 'it has a condition on the output of job ' .. given.id
      .. ', which is encrypted')
  elseif given.is_removed and (condition or job.reads) then
    return 'failed', error_of('payload_lost', 'it needs the output of job ' .. given.id
      .. ', whose result has been removed: submit that job again')
  elseif given.unreadable and (condition or job.reads) then
    return 'failed', error_of('payload_too_large', 'it needs the output of job ' .. given.id
      .. ', whose result lies in a store, or has more than ' .. MAX_RESULT .. ' bytes')
  elseif condition and not is_met(condition, given) then
    return 'cancelled', error_of('condition_false', 'the output of job ' .. given.id .. ' is not what it was to run for')
  end
end

-- Write the output of a job for children of a tenant. Returns its name, or false if it is too large.
local function write_output(given, tenant)
  local line = cjson.encode({
    id = given.id, state = given.state, text = given.text, label = given.label, prob = given.prob,
    sealed = given.sealed, computed_by = given.computed_by
  })
  given.is_large = #line > MAX_OUTPUTS
  if given.is_large then
    return false
  end
  local name = tenant .. ':' .. given.id .. ':' .. int(redis.call('HINCRBY', P .. 'meta', 'token', 1))
  redis.call('SET', P .. 'end:' .. name, line)
  if redis.call('HGET', P .. 'meta', 'memory_room') then
    book_memory(math.ceil(ALLOCATED * #line), 0)
  end
  return name
end

local function is_owned_by(name, tenant)
  return string.sub(name, 1, #tenant + 1) == tenant .. ':'
end

-- Store the output of a job once for all of its children: from then on `output:<id>` has its name instead of the text,
-- and keeps a share of it until all children are notified. Later children find the name in the job's record.
local function store_output(given, tenant)
  local key = P .. 'job:' .. given.id
  local name = redis.call('HGET', key, 'gave')
  if not name or not is_owned_by(name, tenant) or redis.call('EXISTS', P .. 'end:' .. name) == 0 then
    name = write_output(given, tenant)
    if name and redis.call('EXISTS', key) == 1 then
      redis.call('HSET', key, 'gave', name)
    end
  end
  given.tokens = math.floor(#(given.text or given.sealed or '') / TOKEN_BYTES)
  given.text = given.text and string.sub(given.text, 1, MAX_COMPARED + 1)
  given.sealed = given.sealed and true
  if name then
    given.name = name
    share_of_end(name)
    redis.call('SET', P .. 'output:' .. given.id, cjson.encode(given))
  end
end

-- Add an output to those that a job reads. Returns false if they are too large together.
local function add_output(id, job, given)
  local _, _, tenant = split_lane(job.lane)
  if not given.tokens then
    store_output(given, tenant)
  end
  local output = given.name
  if output and not is_owned_by(output, tenant) then
    -- An invalid row of a batch may have children of several tenants. A purge removes all outputs of one.
    output = write_output(given, tenant)
  end
  local bytes = given.is_large and math.huge or redis.call('STRLEN', P .. 'end:' .. output)
  for name in string.gmatch(job.given or '', '%S+') do
    bytes = bytes + redis.call('STRLEN', P .. 'end:' .. name)
  end
  if bytes > MAX_OUTPUTS then
    return false
  end
  share_of_end(output)
  job.given = job.given and job.given .. ' ' .. output or output
  redis.call('HSET', P .. 'job:' .. id, 'given', job.given)
  redis.call('HINCRBY', P .. 'job:' .. id, 'cost', given.tokens)
  return true
end

-- Release a job whose parents have all ended: it waits for a worker, or for its due time.
local function let_run(id, job)
  local due = tonumber(job.due_at or 0)
  if tonumber(job.deadline or math.huge) <= NOW then
    finish(id, job, 'expired', EXPIRED)
  elseif due > NOW then
    redis.call('HDEL', P .. 'job:' .. id, 'waits')
    redis.call('ZADD', P .. 'delayed', int(due), id)
  else
    enqueue(id, job)
    redis.call('HDEL', P .. 'job:' .. id, 'waits', 'due_at')
  end
end

-- Notify a job of the end of a parent; repeating it is harmless.
local function tell(id, given)
  local job = load(id)
  local left, is_awaited = {}, false
  for parent in string.gmatch(job and job.state == 'delayed' and job.waits or '', '%S+') do
    if parent == given.id then
      is_awaited = true
    else
      left[#left + 1] = parent
    end
  end
  if not is_awaited then
    return
  end
  local state, error = verdict(job, given)
  if not state and job.reads and not add_output(id, job, given) then
    state, error = 'failed', error_of('payload_too_large', 'the outputs that it needs have more than '
      .. MAX_OUTPUTS .. ' bytes')
  end
  if state then
    finish(id, job, state, error)
    return
  end
  if given.worker and given.affinity == job.affinity then
    -- Both share a prefix, as far as their affinity shows, so its blocks may be in that worker's cache.
    job.near = near_name(given.worker)
    redis.call('HSET', P .. 'job:' .. id, 'near', job.near)
  end
  if #left > 0 then
    redis.call('HSET', P .. 'job:' .. id, 'waits', table.concat(left, ' '))
  else
    let_run(id, job)
  end
end

local function forget_children(parent)
  redis.call('ZREM', P .. 'awaited', parent)
  local kept = redis.call('GET', P .. 'output:' .. parent)
  if kept then
    redis.call('UNLINK', P .. 'output:' .. parent)
    let_go_of_outputs({given = cjson.decode(kept).name})
  end
end

-- Notify the children of a job of its end. The output is kept while some are left, since the job's record may expire.
function tell_children(given)
  local key = P .. 'children:' .. given.id
  local child = redis.call('ZRANGE', key, 0, 0)[1]
  while child and told < MAX_TOLD do
    told = told + 1
    redis.call('ZREM', key, child)
    tell(child, given)
    child = redis.call('ZRANGE', key, 0, 0)[1]
  end
  if not child then
    forget_children(given.id)
    return
  end
  if not given.name then
    redis.call('SET', P .. 'output:' .. given.id, cjson.encode(given))
  end
  redis.call('ZADD', P .. 'awaited', '0', given.id)
  local lane = redis.call('HGET', P .. 'job:' .. child, 'lane')
  if lane then
    local _, _, _, model = split_lane(lane)
    ring(model)
  end
end

-- A job that has ended while it waited receives no more notifications.
function leave_parents(id, job)
  for parent in string.gmatch(job.waits, '%S+') do
    local key = P .. 'children:' .. parent
    redis.call('ZREM', key, id)
    if redis.call('EXISTS', key) == 0 then
      forget_children(parent)
    end
  end
end

local function has_told_enough()
  return told >= MAX_TOLD or bytes_read >= MAX_READ
end

-- Notify the children of a job if it has ended.
local function tell_of(id)
  if has_told_enough() then
    redis.call('ZADD', P .. 'awaited', '0', id)
    return
  end
  local kept = redis.call('GET', P .. 'output:' .. id)
  if kept then
    bytes_read = bytes_read + #kept
    tell_children(cjson.decode(kept))
    return
  end
  local found = redis.call('HMGET', P .. 'job:' .. id, 'state', 'worker', 'affinity', 'shared', 'leader')
  if not found[1] then
    tell_children({id = id, state = 'gone'})
  elseif not ACTIVE[found[1]] then
    local job = {worker = found[2] or nil, affinity = found[3] or nil, leader = found[5] or nil}
    local outcome = redis.call('GET', P .. (found[4] and 'end:' .. found[4] or 'out:' .. id))
    tell_children(given_by(id, job, found[1], outcome))
  else
    redis.call('ZADD', P .. 'awaited', int(NOW + RECHECK), id)
  end
end

-- Notify the children of ended jobs that have not been notified yet.
local function sweep_awaited(limit)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'awaited', '-inf', int(NOW), 'LIMIT', 0, limit)) do
    if has_told_enough() then
      return
    end
    tell_of(id)
  end
end

-- @hook on_end
on_leave[#on_leave + 1] = function(id, job)
  if job.waits then
    leave_parents(id, job)
  end
end

after_end[#after_end + 1] = function(id, job, state, out)
  if job.awaited then
    tell_children(given_by(id, job, state, out or redis.call('GET', P .. 'end:' .. job.shared)))
  end
end

-- @hook on_sweep
on_sweep[#on_sweep + 1] = function(limit)
  bring_near(P .. 'awaited', RECHECK, SOON, limit)
  sweep_awaited(limit)
end
