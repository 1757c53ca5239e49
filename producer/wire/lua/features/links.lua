-- @include core/states
-- @include core/fields
-- Links that submit creates between a job and its parents.
local MAX_PARENTS = 16
local MAX_CHILDREN = 16384
-- Maximum number of steps from job to parent in a call, to distinguish a cycle from an unknown job.
local MAX_STEPS = 20000
local places, steps = nil, 0
local parents = {} -- the stored ones: state, lane, batch, children (their number), waiters (alternating ranks and ids)

local function is_list_of_ids(text)
  local seen, ids = {}, 0
  for id in string.gmatch(text, '%S+') do
    if seen[id] or #id > 64 or not string.match(id, '^[%w._-]+$') then
      return false
    end
    seen[id], ids = true, ids + 1
  end
  return ids >= 1 and ids <= MAX_PARENTS
end

local function is_list_of_texts(values)
  if values == nil then
    return true
  elseif type(values) ~= 'table' then
    return false
  end
  for key, value in pairs(values) do
    if type(key) ~= 'number' or type(value) ~= 'string' then
      return false
    end
  end
  return true
end

local function is_number(value)
  return value == nil or type(value) == 'number'
end

-- Conditions are checked at submission, since they are evaluated while another job ends.
local function are_conditions(text)
  local read, when = pcall(cjson.decode, text)
  if not read or type(when) ~= 'table' then
    return false
  end
  for _, condition in pairs(when) do
    if type(condition) ~= 'table' or not (is_list_of_texts(condition.label) and is_list_of_texts(condition.text)
      and is_number(condition.prob_at_least) and is_number(condition.prob_below)) then
      return false
    end
  end
  return true
end

-- Whether the job `from` of this call waits for `target`, possibly through others of this call.
local function leads_to(from, target, jobs, seen)
  if from == target then
    return true
  end
  local job = jobs[places[from]]
  if not job or not job.after or seen[from] then
    return false
  end
  seen[from] = true
  for parent in string.gmatch(job.after, '%S+') do
    steps = steps + 1
    if steps > MAX_STEPS or leads_to(parent, target, jobs, seen) then
      return steps <= MAX_STEPS
    end
  end
  return false
end

-- A stored job, looked up once in a call; otherwise nil. All parents of a stored job are stored too.
local function stored(id)
  if not parents[id] then
    local found = redis.call('HMGET', P .. 'job:' .. id, 'state', 'lane', 'batch')
    if not found[1] then
      return nil
    end
    local _, _, tenant, model = split_lane(found[2])
    parents[id] = {
      has_ended = not ACTIVE[found[1]], tenant = tenant, is_bad_row = model == '-' and found[3] == ARGV[1],
      children = redis.call('ZCARD', P .. 'children:' .. id), waiters = {}
    }
  end
  return parents[id]
end

local function refusal_by(job, id, jobs, words)
  local parent = stored(id)
  local _, _, tenant = split_lane(job.lane)
  if not parent then
    local word = places[id] and words[places[id]]
    if leads_to(id, job.id, jobs, {}) then
      return 'cycle:' .. id
    end
    return (word and word ~= 'exists') and 'again' or 'unknown:' .. id
  elseif parent.tenant ~= tenant and not parent.is_bad_row then
    return 'unknown:' .. id
  elseif parent.children >= MAX_CHILDREN then
    return 'crowded:' .. id
  end
end

LONGEST.after, LONGEST.when, LONGEST.otherwise, LARGEST.reads = 1039, 16384, 3, 1
keep_fields('after when otherwise reads')

on_check[#on_check + 1] = function(job)
  return not job.after or (is_list_of_ids(job.after) and are_conditions(job.when or '{}'))
end

on_refuse[#on_refuse + 1] = function(job, jobs, words)
  if not job.after then
    return nil
  end
  if not places then
    places = {}
    for i, one in ipairs(jobs) do
      places[one.id] = places[one.id] or i
    end
  end
  -- Jobs that wait for an earlier job of this id would wait for this one, which may wait for them.
  if redis.call('ZRANK', P .. 'awaited', job.id) then
    return 'cycle:' .. job.id
  end
  for parent in string.gmatch(job.after, '%S+') do
    local word = refusal_by(job, parent, jobs, words)
    if word then
      return word
    end
  end
end

on_submit[#on_submit + 1] = function(job, _, rank)
  job.waits = job.after
  for id in string.gmatch(job.after or '', '%S+') do
    local parent = parents[id]
    parent.children = parent.children + 1
    table.insert(parent.waiters, rank)
    table.insert(parent.waiters, job.id)
  end
end

-- After the jobs are stored: add them to the children of their parents, and process parents that had ended before.
after_submit[#after_submit + 1] = function()
  for id, parent in pairs(parents) do
    if #parent.waiters > 0 then
      for i = 1, #parent.waiters, 500 do
        redis.call('ZADD', P .. 'children:' .. id, unpack(parent.waiters, i, math.min(i + 499, #parent.waiters)))
      end
      redis.call('HSET', P .. 'job:' .. id, 'awaited', 1)
      redis.call('ZADD', P .. 'awaited', 'NX', int(NOW + RECHECK), id)
    end
  end
  for id, parent in pairs(parents) do
    if parent.has_ended and #parent.waiters > 0 then
      tell_of(id)
    end
  end
end
