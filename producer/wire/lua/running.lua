-- List running jobs, ordered by when their leases lapse.
-- KEYS[1] prefix
-- ARGV[1] number to skip  [2] maximum number of jobs  [3] a relay's name: only jobs submitted for it; or ''
-- Returns {jobs read, ids}
local looked = redis.call('ZRANGE', P .. 'leases', ARGV[1], ARGV[1] + ARGV[2] - 1)
local ids = {}
for _, id in ipairs(looked) do
  if ARGV[3] == '' or redis.call('HGET', P .. 'job:' .. id, 'relay') == ARGV[3] then
    ids[#ids + 1] = id
  end
end
return {#looked, ids}
