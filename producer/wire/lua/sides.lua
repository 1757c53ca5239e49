-- @include common
-- A rollout gives a share of a model's jobs to one revision, the canary. `rollouts` has per model
-- `<open, halted, back or ended> <share of 10,000> <id, tenant or batch> <the canary's revision>`, and `rollout:<model>` what
-- is counted of both sides. Jobs of the canary's side wait in lanes of their own, whose last part ends in `~`; all others
-- wait where they always did, so what knows of no rollout sees jobs of the stable side. docs/rollouts.md has the rules.
--
-- One table, and a block around the rest: a script may have 200 local names at most.
local sides = {}
do
  local SHARES = 10000
  local KEPT_RUNS = 256
  local WINDOW = 400
  local SAMPLED, SAMPLED_BYTES = 200, 65536
  local ROLLOUT_TTL = 30 * 86400000

  -- The rollout of the model that the last part of a lane names, or false.
  local rollouts = {}
  function sides.rollout_of(name)
    local model = string.match(name, '^[^#~]*')
    if rollouts[model] == nil then
      local text = redis.call('HGET', P .. 'rollouts', model) or ''
      local state, share, by, to = string.match(text, '^(%l+) (%d+) (%l+) (%S+)$')
      rollouts[model] = state and {model = model, state = state, share = tonumber(share), by = by, to = to} or false
    end
    return rollouts[model]
  end

  function sides.live_workers(name)
    return redis.call('ZCOUNT', P .. 'serves:' .. name, int(NOW), '+inf')
  end

  -- Who is woken for a lane of the canary's side: the canary, or everybody where it has no worker.
  bell_of = function(name)
    local base = string.sub(name, 1, -2)
    local rollout = sides.rollout_of(base)
    if rollout and rollout.state == 'open' and sides.live_workers(name .. rollout.to) > 0 then
      return name .. rollout.to
    end
    return base
  end

  -- The side that a job belongs to while a rollout is open: the same each time, whatever the share was before and after. A job
  -- that has generated something stays where it did. nil for a job that names a revision.
  local unsided = {} -- lanes of models without an open rollout: a call may be about thousands of jobs of one
  function sides.side_of(id, job, batch)
    if unsided[job.lane] then
      return nil
    end
    local _, _, tenant, model = split_lane(job.lane)
    local rollout = not string.find(model, '~', 1, true) and sides.rollout_of(model)
    if not rollout or rollout.state ~= 'open' then
      unsided[job.lane] = true
      return nil
    elseif job.saved then
      return job.side or 'stable'
    end
    local name = (rollout.by == 'tenant' and tenant) or (rollout.by == 'batch' and (job.batch or batch)) or id
    local point = tonumber(string.sub(redis.sha1hex(rollout.to .. ' ' .. name), 1, 8), 16) % SHARES
    return point < rollout.share and 'canary' or 'stable'
  end

  -- The lane of a job as it stands in its record, or that of the canary's side.
  function sides.sided_lane(lane, side)
    return side == 'canary' and lane .. '~' or lane
  end

  -- Where a job is to wait now. Its record says so, for who looks for it there. After a removal only.
  function sides.lane_for(id, job)
    local side = sides.side_of(id, job)
    if side == 'canary' and job.side ~= 'canary' then
      redis.call('HSET', P .. 'job:' .. id, 'side', side)
      job.side = side
    elseif side ~= 'canary' and job.side == 'canary' then
      redis.call('HDEL', P .. 'job:' .. id, 'side')
      job.side = nil
    end
    return sides.sided_lane(job.lane, side)
  end

  -- The canary fails more often than the stable side, by more than the margin, in what was counted last.
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

  -- Keep the input of some jobs that the canary did, so that the stable side can be asked the same. Returns whether it is kept.
  local function keep_sample(id, rollout)
    local key = P .. 'sampled:' .. rollout.model
    if redis.call('LLEN', key) >= SAMPLED or redis.call('STRLEN', P .. 'in:' .. id) > SAMPLED_BYTES then
      return false
    end
    redis.call('RPUSH', key, id)
    redis.call('PEXPIRE', key, ROLLOUT_TTL)
    redis.call('HSET', P .. 'job:' .. id, 'keep', 1)
    redis.call('ZREM', P .. 'large', id)
    return true
  end

  -- An execution on one side of a rollout is over, and it was up to the execution how it ended. After a removal only.
  function sides.note_execution(id, job, has_failed)
    local _, _, _, name = split_lane(job.lane)
    local rollout = sides.rollout_of(name)
    if not rollout then
      return
    end
    local key, side = P .. 'rollout:' .. rollout.model, job.side
    redis.call('HINCRBY', key, side .. ':jobs', 1)
    local recent = redis.call('HINCRBY', key, side .. ':recent', 1)
    if has_failed then
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
      -- What was long ago counts for less and less.
      local failures = tonumber(redis.call('HGET', key, side .. ':recent_failures') or 0)
      redis.call('HSET', key, side .. ':recent', math.floor(recent / 2), side .. ':recent_failures', math.floor(failures / 2))
    end
    if side == 'canary' and not has_failed and not job.keep then
      job.keep = keep_sample(id, rollout) and '1' or nil
    end
  end

  function sides.has_changed(model)
    rollouts[model] = nil
  end
end
-- @level
