-- Tenants whose jobs and files are being removed (purge_fence.lua): meanwhile new ones are rejected. The field
-- `purging` of `meta` has their names, each with the time at which its fence ends. Times beyond the longest fence mean
-- that the clock was set back.
local LONGEST_FENCE = 600000
local function purged_tenants(text)
  local found = {}
  for tenant, falls_at in string.gmatch(text or '', '(%S+) (%d+)') do
    local left = falls_at - NOW
    found[tenant] = left > 0 and left <= LONGEST_FENCE and falls_at or nil
  end
  return found
end

local function is_purged(tenant)
  return purged_tenants(redis.call('HGET', P .. 'meta', 'purging'))[tenant]
end
