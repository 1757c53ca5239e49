-- @include core/hooks
-- @include core/states
-- @hooks on_purge
-- Permanent removal of jobs in any state. Late writes of their workers find no record, and are fenced.
local MAX_REMOVED = 48 -- jobs that one script removes
local gone, running, left = {}, {}, {}

-- All jobs that share an end belong to one tenant, so all of them are removed.
local function drop_end(name)
  drop_stored(NOW, redis.call('HGET', P .. 'sharers:' .. name, 'stored'))
  redis.call('UNLINK', P .. 'end:' .. name, P .. 'sharers:' .. name)
end

local function unlink_if(key, id)
  if redis.call('GET', key) == id then
    redis.call('UNLINK', key)
  end
end

local function remove_one(id, job)
  if ACTIVE[job.state] then
    detach(id, job)
    redis.call('ZREM', P .. 'deadlines', id)
    count(job.batch, job.state, 'cancelled')
    job.state = 'cancelled'
  end
  if job.batch and redis.call('EXISTS', P .. 'batch:' .. job.batch) == 1 then
    redis.call('HINCRBY', P .. 'batch:' .. job.batch, job.state, -1)
    redis.call('HINCRBY', P .. 'batch:' .. job.batch, 'total', -1)
    redis.call('SREM', P .. 'backed:' .. job.batch, id)
  end
  if job.idem then
    unlink_if(P .. 'idem:' .. job.idem, id)
  end
  if job.twin then
    unlink_if(P .. 'twin:' .. job.twin, id)
    local shared = redis.call('HGET', P .. 'settling:' .. id, 'shared')
    if shared then
      drop_end(shared)
    end
    redis.call('UNLINK', P .. 'settling:' .. id)
    redis.call('ZREM', P .. 'settling', id)
  end
  for name in string.gmatch((job.shared or '') .. ' ' .. (job.given or ''), '%S+') do
    drop_end(name)
  end
  redis.call('HDEL', P .. 'job:' .. id, 'shared', 'given')
  call_all(on_purge, id, job)
  redis.call('ZREM', P .. 'outbox', id)
  if job.relay then
    redis.call('ZREM', P .. 'outbox:' .. job.relay, id)
  end
  if redis.call('EXISTS', P .. 'children:' .. id) == 0 then
    forget_children(id)
  end
  erase(id)
  redis.call('PUBLISH', P .. 'ended', id)
  gone[#gone + 1] = id
end

-- Returns whether the job was removed. A running job is only asked to end, unless removal is forced. Duplicates are
--   removed before their primary job; otherwise they would never receive an end.
local function remove(id, job, by_force)
  if job.state == 'running' and not by_force then
    if not job.ending then
      ask_to_end(id, 'cancelled')
    end
    running[#running + 1] = id
    return false
  end
  local key = P .. 'followers:' .. id
  local followers = job.twin and redis.call('ZRANGE', key, 0, math.max(0, MAX_REMOVED - #gone)) or {}
  for _, follower in ipairs(followers) do
    local found = load(follower)
    redis.call('ZREM', key, follower)
    if found then
      remove_one(follower, found)
    end
  end
  if #gone >= MAX_REMOVED or (job.twin and redis.call('EXISTS', key) == 1) then
    left[#left + 1] = id
    return false
  end
  remove_one(id, job)
  return true
end

local function tenant_of(job)
  local _, _, tenant = split_lane(job.lane or '')
  return tenant
end
