-- Reject new jobs, files and batches of a tenant for a time, or accept them again.
-- KEYS[1] prefix
-- ARGV[1] tenant  [2] ms from now, 0: accept them again
-- Returns 1
-- @include core/purged
local fences = purged_tenants(redis.call('HGET', P .. 'meta', 'purging'))
fences[ARGV[1]] = ARGV[2] ~= '0' and int(NOW + ARGV[2]) or nil
local text = {}
for tenant, falls_at in pairs(fences) do
  text[#text + 1] = tenant .. ' ' .. falls_at
end
redis.call('HDEL', P .. 'meta', 'purging')
if #text > 0 then
  redis.call('HSET', P .. 'meta', 'purging', table.concat(text, ' '))
end
return 1
