-- @include trails
-- Lists the jobs that each audited worker commits, and keeps their inputs as long as the list, so that all of them can
-- run again if the worker turns out to compute wrong results.
-- @hook on_end
do
  local MAX_LISTED, SLACK = 20000, 512
  local LISTED_TTL = 86400000
  local workers = {} -- per call: the audit state of a worker, and the entries to add; false: not audited

  local function trail_of(worker)
    if workers[worker] == nil then
      local found = redis.call('HMGET', P .. 'audit:' .. worker, 'room', 'held')
      workers[worker] = found[1] and {left = found[1] - (found[2] or 0), held = 0, entries = {}}
    end
    return workers[worker]
  end

  local function write()
    for worker, trail in pairs(workers) do
      if trail and #trail.entries > 0 then
        local key = P .. 'did:' .. worker
        local length = redis.call('RPUSH', key, unpack(trail.entries))
        if length == #trail.entries then
          redis.call('PEXPIRE', key, LISTED_TTL)
        end
        if trail.held > 0 then
          redis.call('HINCRBY', P .. 'audit:' .. worker, 'held', int(trail.held))
        end
        if length > MAX_LISTED + SLACK then
          trails.forget(worker, SLACK)
          redis.call('HSET', P .. 'audit:' .. worker, 'lost_to', redis.call('HGET', P .. 'audit:' .. worker, 'base'))
        end
        trail.entries, trail.held = {}, 0
      end
    end
  end
  on_flush[#on_flush + 1] = write

  on_end[#on_end + 1] = function(id, job, state)
    if state ~= 'succeeded' then
      return
    end
    -- A duplicate has the result of its primary job.
    local worker = job.worker or (job.leader and redis.call('HGET', P .. 'job:' .. job.leader, 'worker'))
    local trail = worker and trail_of(worker)
    if not trail then
      return
    end
    local entry = id
    if not job.keep and not job.stored and not job.given then
      local bytes = redis.call('STRLEN', P .. 'in:' .. id)
      if bytes > 0 and bytes <= trail.left then
        trail.left, trail.held = trail.left - bytes, trail.held + bytes
        job.keep, entry = '1', id .. ' ' .. int(bytes)
      end
    end
    trail.entries[#trail.entries + 1] = entry
    if not together then
      write()
    end
  end
end

-- @hook on_purge
on_purge[#on_purge + 1] = function(id, job)
  local worker = job.worker or (job.leader and redis.call('HGET', P .. 'job:' .. job.leader, 'worker'))
  if not worker then
    return
  end
  local key, about = P .. 'did:' .. worker, P .. 'audit:' .. worker
  local bytes = redis.call('STRLEN', P .. 'in:' .. id)
  local with_input = redis.call('LREM', key, 1, id .. ' ' .. int(bytes))
  if with_input + redis.call('LREM', key, 1, id) > 0 and redis.call('EXISTS', about) == 1 then
    -- Earlier entries get a later position, and are at worst deleted later.
    redis.call('HINCRBY', about, 'base', 1)
    redis.call('HINCRBY', about, 'held', int(0 - with_input * bytes))
  end
end
