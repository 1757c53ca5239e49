-- What the jobs took that ended today, of all tenants together.
-- KEYS[1] prefix
-- Returns {jobs, prompt tokens, of them cached, generated tokens, ms of the device, tenants whose jobs wait for a quota}
-- @include ledger
fold_usage()
local sums = {0, 0, 0, 0, 0}
for _, row in ipairs(redis.call('HVALS', P .. 'usage:' .. math.floor(NOW / 86400000))) do
  local i = 1
  for number in string.gmatch(row, '%d+') do
    sums[i] = sums[i] + number
    i = i + 1
  end
end
sums[6] = redis.call('ZCARD', P .. 'parked')
return sums
