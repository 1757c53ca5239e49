-- Tenants whose jobs and files are being removed (purge_fence.lua): nothing new of theirs is taken meanwhile. The field
-- `purging` of `meta` has their names, each with the time its fence falls.
local function purged_tenants(text)
  local found = {}
  for tenant, falls_at in string.gmatch(text or '', '(%S+) (%d+)') do
    found[tenant] = tonumber(falls_at) > NOW and falls_at or nil
  end
  return found
end

local function is_purged(tenant)
  return purged_tenants(redis.call('HGET', P .. 'meta', 'purging'))[tenant]
end
