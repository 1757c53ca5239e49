-- Return the usage ledger of the jobs that ended on a day.
-- KEYS[1] prefix
-- ARGV[1] the day, in days since 1970-01-01; without one, the days are listed
-- Returns the days that have rows, oldest first; or for one day pairs of row and sums: `<tenant>:<model>` or
--   `<tenant>:<model> <API key>`, and `<jobs> <prompt tokens> <of them cached> <generated tokens> <ms of the device>`.
--   `*:*` is the usage beyond the day's maximum number of rows.
-- @include features/ledger
fold_usage()
if ARGV[1] then
  return redis.call('HGETALL', P .. 'usage:' .. ARGV[1])
end
local days = {}
for _, day in ipairs(redis.call('ZRANGE', P .. 'usage', 0, -1)) do
  if redis.call('EXISTS', P .. 'usage:' .. day) == 1 then
    days[#days + 1] = day
  end
end
return days
