-- @include features/quotas
-- @include spells
-- Enforcement of quotas. A lane whose next job exceeds its tenant's quota is parked: removed from the turns, so that
-- pulls skip it, until the quota has capacity. `parked` has the tenants by that time, `parked:<tenant>` their lanes.
local charging_of_call
local function charging()
  if charging_of_call then
    return charging_of_call
  end
  local quotas = new_quotas()
  charging_of_call = quotas
  local MINUTE, DAY_MS = quotas.MINUTE, quotas.DAY
  local MAX_UNPARKED = 64
  -- A lane is checked again after at most this time: the quota may have capacity earlier than planned if the clock was
  -- set back.
  local MAX_PAUSE = 600000
  local SPENT_TTL = 2 * DAY_MS

  local function save_spent(tenant, spent)
    redis.call('SET', P .. 'spent:' .. tenant, string.format('%.6f %.6f %.0f %.0f %.0f %.0f', spent[1], spent[2], NOW,
      math.floor(NOW / DAY_MS), spent[3], spent[4]), 'PX', SPENT_TTL)
  end

  -- Return in how many ms the tenant may start a job of that cost, in tokens. A job that costs more than the full quota
  -- waits until the quota is full.
  local function quota_pause(quota, spent, cost)
    local pause = 0
    for i = 1, 4 do
      local amount = i % 2 == 1 and cost or 1
      local limit = quota[i]
      if limit and spent[i] > 0 and spent[i] + amount > limit then
        local wait = DAY_MS - NOW % DAY_MS
        if i <= 2 then
          wait = math.ceil((spent[i] - math.max(0, limit - amount)) / limit * MINUTE)
        end
        pause = math.max(pause, wait)
      end
    end
    return math.min(pause, MAX_PAUSE)
  end

  function quotas.park(lane, pause)
    local needs, class, tenant, model = split_lane(lane)
    redis.call('ZREM', turns_key(needs, class, model), tenant)
    redis.call('SADD', P .. 'parked:' .. tenant, lane)
    note_spell(P .. 'over:' .. tenant, NOW)
    local due = redis.call('ZSCORE', P .. 'parked', tenant)
    if not due or NOW + pause < tonumber(due) then
      redis.call('ZADD', P .. 'parked', int(NOW + pause), tenant)
    end
  end

  -- Return lanes whose pause has ended to the turns, some per call. A longer pause means that the clock was set back.
  function quotas.unpark()
    local left = MAX_UNPARKED
    for _, range in ipairs({{'-inf', int(NOW)}, {int(NOW + MAX_PAUSE + 1), '+inf'}}) do
      for _, tenant in ipairs(redis.call('ZRANGEBYSCORE', P .. 'parked', range[1], range[2], 'LIMIT', 0, MAX_UNPARKED)) do
        while left > 0 do
          local lane = redis.call('SPOP', P .. 'parked:' .. tenant)
          if not lane then
            redis.call('ZREM', P .. 'parked', tenant)
            end_spell(P .. 'over:' .. tenant)
            break
          end
          left = left - 1
          if redis.call('EXISTS', P .. 'wait:' .. lane) == 1 then
            open_lane(lane)
          end
        end
      end
    end
  end

  -- Return the earlier of `due` (ms from now, or -1) and the end of the next tenant's pause.
  function quotas.or_due(due)
    local first = redis.call('ZRANGE', P .. 'parked', 0, 0, 'WITHSCORES')[2]
    if not first then
      return due
    end
    local wait = math.max(0, first - NOW)
    return due < 0 and wait or math.min(due, wait)
  end

  -- The sums that tenants have spent, including this call's jobs, and the tenants that started some of them.
  local spending, has_started = {}, {}

  local function spending_of(tenant, quota)
    spending[tenant] = spending[tenant] or quotas.spent(tenant, quota)
    return spending[tenant]
  end

  -- A job is charged once, regardless of how often it is pulled; a copy for a comparison is never charged.
  local function quota_for(job, tenant)
    return not job.charged and not job.uncounted and quotas.of(tenant)
  end

  -- Return in how many ms the job may start; 0: now. A tenant at its limit is checked again when one of its jobs stops.
  function quotas.pause_of(job, lane, cost)
    local _, _, tenant = split_lane(lane)
    if quotas.is_full(tenant) then
      return MAX_PAUSE
    end
    local quota = quota_for(job, tenant)
    return quota and quota_pause(quota, spending_of(tenant, quota), cost) or 0
  end

  function quotas.charge(id, job, lane, cost)
    local _, _, tenant = split_lane(lane)
    local quota = quota_for(job, tenant)
    if quota then
      local spent = spending_of(tenant, quota)
      spent[1], spent[2], spent[3], spent[4] = spent[1] + cost, spent[2] + 1, spent[3] + cost, spent[4] + 1
      has_started[tenant] = true
      redis.call('HSET', P .. 'job:' .. id, 'charged', int(cost) .. ' ' .. math.floor(NOW / DAY_MS))
    end
  end

  function quotas.note_run(id, _, lane)
    local _, _, tenant = split_lane(lane)
    redis.call('ZADD', P .. 'runs', 0, tenant .. ' ' .. id)
  end

  -- Let the next pull check the tenant's parked lanes again.
  local function recheck(tenant, model)
    if redis.call('ZADD', P .. 'parked', 'XX', 'CH', int(NOW), tenant) == 1 then
      ring(model)
    end
  end

  function quotas.note_stop(id, job)
    local _, _, tenant, model = split_lane(job.lane)
    local quota = redis.call('ZREM', P .. 'runs', tenant .. ' ' .. id) == 1 and quotas.of(tenant)
    if quota and quota[5] then
      recheck(tenant, model)
    end
  end

  function quotas.save()
    for tenant in pairs(has_started) do
      save_spent(tenant, spending[tenant])
    end
  end

  -- End a charged job: its estimated cost is returned, and its actual usage is counted.
  function quotas.settle(job, tokens)
    local _, _, tenant, model = split_lane(job.lane)
    local cost, day = string.match(job.charged, '^(%d+) (%d+)$')
    local quota = quotas.of(tenant)
    if not quota or not cost then
      return
    end
    local spent = spending_of(tenant, quota)
    spent[1] = math.max(0, spent[1] + tokens - cost)
    if tonumber(day) == math.floor(NOW / DAY_MS) then
      spent[3] = math.max(0, spent[3] + tokens - cost)
    else
      spent[3], spent[4] = spent[3] + tokens, spent[4] + 1
    end
    save_spent(tenant, spent)
    recheck(tenant, model)
  end

  return quotas
end
