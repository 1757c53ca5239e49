-- Remove a tenant from a day of the ledger, and its spent quotas. The quotas themselves stay.
-- KEYS[1] prefix
-- ARGV[1] the tenant  [2] the day, in days since 1970-01-01
-- Returns the number of rows removed
-- @include features/ledger
fold_usage()
local key, cursor, rows = P .. 'usage:' .. ARGV[2], '0', {}
repeat
  local page = redis.call('HSCAN', key, cursor, 'MATCH', ARGV[1] .. ':*', 'COUNT', 1000)
  cursor = page[1]
  for i = 1, #page[2], 2 do
    rows[#rows + 1] = page[2][i]
  end
until cursor == '0'
local removed = 0
for i = 1, #rows, 1000 do
  removed = removed + redis.call('HDEL', key, unpack(rows, i, math.min(i + 999, #rows)))
end
redis.call('UNLINK', P .. 'spent:' .. ARGV[1])
return removed
