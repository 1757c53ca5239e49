-- Return the tenants that have jobs in a part of a batch.
-- KEYS[1] prefix
-- ARGV[1] batch id  [2] position to start from  [3] jobs to read
-- Returns {the recorded owner, * for several, or '', jobs read, tenants}; invalid rows are left out
local ids = redis.call('LRANGE', P .. 'bjobs:' .. ARGV[1], ARGV[2], ARGV[2] + ARGV[3] - 1)
local seen, tenants = {}, {}
for _, id in ipairs(ids) do
  local lane = redis.call('HGET', P .. 'job:' .. id, 'lane')
  local _, _, tenant, model = split_lane(lane or '')
  if tenant and model ~= '-' and not seen[tenant] then
    seen[tenant] = true
    tenants[#tenants + 1] = tenant
  end
end
return {redis.call('GET', P .. 'bowner:' .. ARGV[1]) or '', #ids, tenants}
