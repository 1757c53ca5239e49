-- @include states
-- How submit links a job to those it waits for.
local MAX_PARENTS = 16
local MAX_CHILDREN = 16384
local places, ended = nil, {}

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

-- Whether the job `from` of this call waits for `target`, perhaps through others of this call.
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
    if leads_to(parent, target, jobs, seen) then
      return true
    end
  end
  return false
end

local function refusal_by(job, parent, jobs, words)
  local found = redis.call('HMGET', P .. 'job:' .. parent, 'state', 'lane', 'batch')
  local _, _, tenant = split_lane(job.lane)
  if leads_to(parent, job.id, jobs, {}) then
    return 'cycle:' .. parent
  elseif not found[1] then
    local word = places[parent] and words[places[parent]]
    return (word and word ~= 'exists') and 'again' or 'unknown:' .. parent
  end
  local _, _, owner, model = split_lane(found[2])
  local is_bad_row = model == '-' and found[3] == ARGV[1]
  if owner ~= tenant and not is_bad_row then
    return 'unknown:' .. parent
  elseif redis.call('ZCARD', P .. 'children:' .. parent) >= MAX_CHILDREN then
    return 'crowded:' .. parent
  end
end

links = {
  is_sound = function(job)
    local read, when = pcall(cjson.decode, job.when or '{}')
    return is_list_of_ids(job.after) and read and type(when) == 'table'
  end,

  -- The word for a job that can't wait for what it names.
  refusal = function(job, jobs, words)
    if not places then
      places = {}
      for i, one in ipairs(jobs) do
        places[one.id] = places[one.id] or i
      end
    end
    -- Whoever waits for an earlier job of this id would wait for this one, which may wait for them.
    if redis.call('ZRANK', P .. 'awaited', job.id) then
      return 'cycle:' .. job.id
    end
    for parent in string.gmatch(job.after, '%S+') do
      local word = refusal_by(job, parent, jobs, words)
      if word then
        return word
      end
    end
  end,

  hold = function(job, rank)
    job.waits = job.after
    for parent in string.gmatch(job.after, '%S+') do
      redis.call('ZADD', P .. 'children:' .. parent, rank, job.id)
      redis.call('HSET', P .. 'job:' .. parent, 'awaited', 1)
      redis.call('ZADD', P .. 'awaited', 'NX', int(NOW + RECHECK), parent)
      if not ACTIVE[redis.call('HGET', P .. 'job:' .. parent, 'state')] then
        ended[parent] = true
      end
    end
  end,

  -- Tell the new jobs of parents that had ended before.
  tell = function()
    for parent in pairs(ended) do
      tell_of(parent)
    end
  end
}
