-- Return the usage of all jobs that ended today. Reads only, since an exporter's user must not write.
-- KEYS[1] prefix
-- Returns {jobs, prompt tokens, of them cached, generated tokens, ms of the device, tenants that wait for a quota}
local day, sums = math.floor(NOW / 86400000), {0, 0, 0, 0, 0}
local function add(numbers)
  local i = 1
  for number in string.gmatch(numbers, '%d+') do
    sums[i] = sums[i] + number
    i = i + 1
  end
end
for _, row in ipairs(redis.call('HVALS', P .. 'usage:' .. day)) do
  add(row)
end
for _, entry in ipairs(redis.call('LRANGE', P .. 'usage:new', 0, -1)) do -- up to 64
  local of, numbers = string.match(entry, '^(%d+) (%d+ %d+ %d+ %d+) ')
  if tonumber(of) == day then
    add('1 ' .. numbers)
  end
end
sums[6] = redis.call('ZCARD', P .. 'parked')
return sums
