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

-- @hook on_submit
-- Add a line to the reply for each tenant with quotas: its name, then limit, remainder and ms until full, for tokens
-- per minute, jobs per minute, tokens per day, jobs per day and concurrent jobs; `-` if unlimited.
after_submit[#after_submit + 1] = function(tenants, reply)
  local quotas, told = has_quotas() and new_quotas(), {}
  for _, tenant in pairs(quotas and tenants or {}) do
    reply[#reply + 1] = not told[tenant] and quotas.line(tenant) or nil
    told[tenant] = true
  end
end

-- @hook on_pull
-- @include features/charging
on_pull[#on_pull + 1] = function(names)
  if has_quotas() then
    local quotas = charging()
    may_start[#may_start + 1] = function(job, lane, cost)
      local pause = quotas.pause_of(job, lane, cost)
      return pause > 0 and function()
        quotas.park(lane, pause)
      end
    end
    on_start[#on_start + 1] = quotas.charge
    on_start[#on_start + 1] = quotas.note_run
    on_flush[#on_flush + 1] = quotas.save
    on_due[#on_due + 1] = quotas.or_due
  end
  return names
end

-- @hook on_sweep
-- @include features/charging
on_sweep[#on_sweep + 1] = function()
  if has_quotas() then
    charging().unpark()
  end
end

-- @hook on_end
-- @include features/charging
on_stop[#on_stop + 1] = function(id, job)
  if has_quotas() then
    charging().note_stop(id, job)
  end
end

on_end[#on_end + 1] = function(_, job)
  if job.charged then
    local input, output = string.match(used_by(job), '^(%d+) %d+ (%d+)')
    charging().settle(job, input + output)
  end
end
