-- Quotas of tenants, and what they have spent of them: jobs count when they start, tokens by their cost until they
-- end, and by what they took then. A minute's quota is a bucket that fills in a minute; a day's begins at 0:00 UTC.
-- Made when it is needed: a commit must not pay for functions that it does not call.
local function new_quotas()
  local quotas = {MINUTE = 60000, DAY = 86400000}
  local MINUTE, DAY_MS = quotas.MINUTE, quotas.DAY
  -- {tokens a minute, jobs a minute, tokens a day, jobs a day, jobs that run at once}, false or nil where there is none; nil for
  -- a tenant without quotas.
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

  -- The four sums that a tenant has spent at this moment.
  function quotas.spent(tenant, quota)
    local found = redis.call('GET', P .. 'spent:' .. tenant) or ''
    local tokens, jobs, at, day, day_tokens, day_jobs = string.match(found, '^(%S+) (%S+) (%d+) (%d+) (%d+) (%d+)$')
    local spent = {0, 0, 0, 0}
    if tokens then
      -- Where the clock was set back by more than a minute, that minute has passed.
      local passed = at - NOW > MINUTE and math.huge or math.max(0, NOW - at) / MINUTE
      spent[1] = quota[1] and math.max(0, tokens - passed * quota[1]) or 0
      spent[2] = quota[2] and math.max(0, jobs - passed * quota[2]) or 0
      if tonumber(day) == math.floor(NOW / DAY_MS) then
        spent[3], spent[4] = tonumber(day_tokens), tonumber(day_jobs)
      end
    end
    return spent
  end

  -- `runs` has the running jobs, as `<tenant> <id>`, while there are quotas.
  function quotas.running(tenant)
    return redis.call('ZLEXCOUNT', P .. 'runs', '[' .. tenant .. ' ', '(' .. tenant .. '!')
  end

  -- Whether a tenant runs as many jobs as it may.
  function quotas.is_full(tenant)
    local quota = quotas.of(tenant)
    return quota and quota[5] and quotas.running(tenant) >= quota[5] or false
  end

  -- A tenant's quotas in a reply: its name, then limit, what is left and in how many ms all of it is, of each of the five;
  -- nil where it has none.
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

local are_set -- as far as this call has asked
local function has_quotas()
  if are_set == nil then
    are_set = redis.call('HGET', P .. 'meta', 'quotas') == '1'
  end
  return are_set
end

-- @hook on_submit
-- Adds a line to the reply for each tenant that has quotas: its name, and limit, what is left and ms until all of it is left, of
-- tokens a minute, jobs a minute, tokens a day, jobs a day and jobs that run at once; `-` where there is none.
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
