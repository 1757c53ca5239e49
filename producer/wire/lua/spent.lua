-- @include common
-- Quotas of tenants, and what they have spent of them: jobs count when they start, tokens by their cost until they
-- end, and by what they took then. A minute's quota is a bucket that fills in a minute; a day's begins at 0:00 UTC.
-- Made when it is needed: a commit must not pay for functions that it does not call.
local function new_quotas()
  local quotas = {MINUTE = 60000, DAY = 86400000}
  local MINUTE, DAY_MS = quotas.MINUTE, quotas.DAY
  -- {tokens a minute, jobs a minute, tokens a day, jobs a day}, false where there is none; nil for a tenant without quotas.
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

  -- A tenant's quotas in a reply: its name, then limit, what is left and in how many ms all of it is, of each of the four;
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
    return table.concat(parts, ' ')
  end

  return quotas
end
