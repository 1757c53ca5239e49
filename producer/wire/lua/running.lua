-- Jobs that run, those whose lease lapses first in front.
-- KEYS[1] prefix
-- ARGV[1] how many to pass over  [2] jobs at most  [3] a relay's name: only jobs that were submitted for it; or ''
-- Returns {jobs looked at, ids}
local looked = redis.call('ZRANGE', P .. 'leases', ARGV[1], ARGV[1] + ARGV[2] - 1)
local ids = {}
for _, id in ipairs(looked) do
  if ARGV[3] == '' or redis.call('HGET', P .. 'job:' .. id, 'relay') == ARGV[3] then
    ids[#ids + 1] = id
  end
end
return {#looked, ids}
