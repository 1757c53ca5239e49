-- Remove a tenant from the ledger, and what it has spent of its quotas. Its quotas themselves stay.
-- KEYS[1] prefix
-- ARGV[1] the tenant
-- Returns how many rows were removed
-- @include ledger
fold_usage()
local removed = 0
for _, day in ipairs(redis.call('ZRANGE', P .. 'usage', 0, -1)) do
  local key, cursor = P .. 'usage:' .. day, '0'
  local rows = {}
  repeat
    local page = redis.call('HSCAN', key, cursor, 'MATCH', ARGV[1] .. ':*', 'COUNT', 1000)
    cursor = page[1]
    for i = 1, #page[2], 2 do
      rows[#rows + 1] = page[2][i]
    end
  until cursor == '0'
  for i = 1, #rows, 1000 do
    removed = removed + redis.call('HDEL', key, unpack(rows, i, math.min(i + 999, #rows)))
  end
end
redis.call('UNLINK', P .. 'spent:' .. ARGV[1])
return removed
