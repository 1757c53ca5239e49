-- The owner of a batch: `bowner:<batch>` is the tenant of all of its jobs, or * if several tenants have jobs in it.
local OWNER_TTL = 2592000000

local function note_owner(batch, tenants)
  local owner
  for _, tenant in pairs(tenants) do
    owner = (not owner or owner == tenant) and tenant or '*'
  end
  local key = P .. 'bowner:' .. batch
  local known = redis.call('GET', key)
  if owner and known ~= owner and known ~= '*' then
    redis.call('SET', key, known and '*' or owner, 'PX', OWNER_TTL)
  end
end
