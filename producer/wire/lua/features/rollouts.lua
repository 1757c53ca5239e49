-- @include core/knowing
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

-- @hook on_submit
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

-- @hook on_pull
do
  local MOVED = 64 -- jobs per call
  local MAX_PLACES_READ = 64

  -- Return jobs to the other workers that the live workers of an open canary cannot run and the others can: the worker
  -- that could was replaced. Jobs that name the revision stay. Up to `limit` jobs are read.
  local function move_unable(rollout, name, limit)
    local revision = name .. '~' .. rollout.to
    for _, place in ipairs(redis.call('ZRANGE', needs_key(revision), 0, MAX_PLACES_READ - 1)) do
      local class, needs = string.match(place, '^(%w):(.+)$')
      local plain = lane_name(needs, class, '-', name)
      local is_unable = limit > 0 and needs ~= '1' and not rollouts.is_able(rollout, plain, name, 'canary')
        and rollouts.is_able(rollout, plain, name, 'stable')
      local tenants = is_unable and redis.call('ZRANGE', turns_key(needs, class, revision), 0, limit - 1) or {}
      for _, tenant in ipairs(tenants) do
        local waiting = P .. 'wait:' .. lane_name(needs, class, tenant, revision)
        local first = NOW % math.max(1, redis.call('ZCARD', waiting) - limit + 1)
        local members = limit > 0 and redis.call('ZRANGE', waiting, first, first + limit - 1) or {}
        for _, name_there in ipairs(members) do
          local id = split_member(name_there)
          local job = load(id)
          limit = limit - 1
          if job and job.side and job.state == 'queued' then
            enqueue(id, job)
          end
        end
      end
    end
  end

  -- Leave the jobs of the other side to its workers.
  on_pull[#on_pull + 1] = function(names)
    if redis.call('EXISTS', P .. 'rollouts') == 0 then
      return names
    end
    local served, found, are_moved, are_checked = {}, {}, {}, {}
    for _, name in ipairs(names) do
      served[name] = true
    end
    for _, name in ipairs(names) do
      local base, revision = string.match(name, '^([^~]*)~?(.*)$')
      local rollout = rollouts.of(name)
      local is_left = false
      -- A canary that does not serve such a name, such as an adapter of the old base, has no jobs to move.
      local may_move = rollout and (rollout.state ~= 'open'
        or redis.call('EXISTS', needs_key(base .. '~' .. rollout.to)) == 1)
      if may_move and not rollouts.is_taking(rollout, base) and are_moved[rollout] == nil then
        are_moved[rollout] = redis.call('EXISTS', P .. 'canary:' .. rollout.model) == 0
          or rollouts.move_back(rollout, MOVED) == 0
      elseif may_move and rollouts.is_taking(rollout, base) and not are_checked[base] then
        are_checked[base] = true
        move_unable(rollout, base, MOVED)
      end
      if rollout and rollout.state ~= 'ended' and served[base .. '~' .. rollout.to] then
        if revision == '' then
          is_left = rollout.state ~= 'open' or rollouts.num_stable(rollout, base) > 0
        else
          is_left = revision == rollout.to and rollout.state ~= 'open' and not are_moved[rollout]
        end
      end
      if not is_left then
        found[#found + 1] = name
      end
    end
    return found
  end
end

-- @hook on_end
-- A job of the canary stays with it only while the canary takes jobs.
on_return[#on_return + 1] = function(id, job)
  if job.side ~= 'canary' then
    return
  end
  local lane, to = string.match(job.lane, '^(.*)~([^~]*)$')
  if not lane then
    return
  end
  local _, _, _, name = split_lane(lane)
  local rollout = rollouts.of(name)
  local key = P .. 'canary:' .. string.match(name, '^[^#]*')
  if rollout and rollout.to == to and rollouts.is_taking_from(rollout, lane, name) then
    redis.call('ZADD', key, job.seq, id)
    return
  end
  redis.call('ZREM', key, id)
  redis.call('HDEL', P .. 'job:' .. id, 'side')
  redis.call('HSET', P .. 'job:' .. id, 'lane', lane)
  job.side, job.lane = nil, lane
end

do
  local SHARES = 10000
  local KEPT_RUNS = 256
  local WINDOW = 400
  local SAMPLED, SAMPLED_BYTES = 200, 65536
  local ROLLOUT_TTL = 30 * 86400000
  -- Errors caused neither by the job nor by its store. A crash counts as well.
  local BLAMED = {engine_error = true, out_of_memory = true, worker_lost = true, output_invalid = true}

  local function code_of(job, out)
    local read, error = pcall(cjson.decode, out or redis.call('GET', P .. 'end:' .. job.shared) or '')
    if read and type(error) == 'table' then
      return error.code == 'attempts_exhausted' and error.cause or error.code
    end
  end

  -- Whether the canary fails more often than the stable side, by more than the margin, in recent counts.
  local function is_worse(found)
    local margin, least, jobs, failures, stable, stable_failures = unpack(found)
    jobs, failures, stable = tonumber(jobs or 0), tonumber(failures or 0), tonumber(stable or 0)
    local usual = stable > 0 and tonumber(stable_failures or 0) / stable or 0
    return jobs >= tonumber(least or 0) and failures / jobs > usual + tonumber(margin or SHARES) / SHARES
  end

  local function halt_if_worse(rollout)
    local key = P .. 'rollout:' .. rollout.model
    local found = redis.call('HMGET', key, 'margin', 'least', 'canary:recent', 'canary:recent_failures', 'stable:recent',
      'stable:recent_failures')
    if rollout.state == 'open' and is_worse(found) then
      rollout.state = 'halted'
      redis.call('HSET', P .. 'rollouts', rollout.model,
        table.concat({'halted', int(rollout.share), rollout.by, rollout.to}, ' '))
      redis.call('HSET', key, 'changed_at', int(NOW), 'reason', 'failures')
      ring(rollout.model)
    end
  end

  -- Keep the input of some of the canary's jobs, for the stable side to run again. Returns whether it is kept.
  local function keep_sample(id, rollout)
    local key = P .. 'sampled:' .. rollout.model
    if redis.call('LLEN', key) >= SAMPLED or redis.call('STRLEN', P .. 'in:' .. id) > SAMPLED_BYTES then
      return false
    end
    redis.call('RPUSH', key, id)
    redis.call('PEXPIRE', key, ROLLOUT_TTL)
    redis.call('HSET', P .. 'job:' .. id, 'keep', 1)
    return true
  end

  -- The rollout of a job whose execution ended, and its side; nil if it does not count because it started before the
  -- rollout, or names a revision.
  local function side_of(job)
    local _, _, _, name = split_lane(job.lane)
    local rollout = job.state == 'running' and rollouts.of(name)
    if not rollout or rollout.state == 'ended'
      or tonumber(redis.call('HGET', P .. 'rollout:' .. rollout.model, 'started_at')) > tonumber(job.started_at) then
      return nil
    elseif job.side then
      return rollout, string.sub(name, -#rollout.to - 1) == '~' .. rollout.to and 'canary' or nil
    end
    return rollout, not string.find(name, '~', 1, true) and rollouts.num_stable(rollout, name) > 0 and 'stable' or nil
  end

  local function note_run(id, job, rollout, side, failed)
    local key = P .. 'rollout:' .. rollout.model
    redis.call('HINCRBY', key, side .. ':jobs', 1)
    local recent = redis.call('HINCRBY', key, side .. ':recent', 1)
    if failed then
      redis.call('HINCRBY', key, side .. ':failures', 1)
      redis.call('HINCRBY', key, side .. ':recent_failures', 1)
      halt_if_worse(rollout)
    else
      local runs = P .. 'ran:' .. side .. ':' .. rollout.model
      redis.call('LPUSH', runs, int(math.max(0, NOW - job.started_at)))
      redis.call('LTRIM', runs, 0, KEPT_RUNS - 1)
      redis.call('PEXPIRE', runs, ROLLOUT_TTL)
    end
    if recent >= WINDOW then
      -- Older executions have a decreasing weight.
      local failures = tonumber(redis.call('HGET', key, side .. ':recent_failures') or 0)
      redis.call('HSET', key, side .. ':recent', math.floor(recent / 2), side .. ':recent_failures', math.floor(failures / 2))
    end
    if side == 'canary' and not failed and not job.keep then
      job.keep = keep_sample(id, rollout) and '1' or nil
    end
  end

  on_failure[#on_failure + 1] = function(id, job, kind, code)
    local rollout, side = side_of(job)
    if side and (kind == 'crashed' or BLAMED[code or '']) then
      note_run(id, job, rollout, side, true)
    end
  end

  on_end[#on_end + 1] = function(id, job, state, out)
    rollouts.forget(id, job)
    local rollout, side = side_of(job)
    if side and (state == 'succeeded' or BLAMED[code_of(job, out) or '']) then
      note_run(id, job, rollout, side, state ~= 'succeeded')
    end
  end
end

-- @hook on_purge
on_purge[#on_purge + 1] = function(id, job)
  redis.call('LREM', P .. 'sampled:' .. rollouts.forget(id, job), 0, id)
end
