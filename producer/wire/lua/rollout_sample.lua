-- Jobs of the canary whose input was kept, and what became of comparing them.
-- KEYS[1] prefix
-- ARGV[1] model  [2] jobs that were compared and [3] those that agreed, to be noted; '' to ask for the jobs
-- Returns ids
if ARGV[2] ~= '' and redis.call('EXISTS', P .. 'rollout:' .. ARGV[1]) == 1 then
  redis.call('HSET', P .. 'rollout:' .. ARGV[1], 'compared', ARGV[2], 'agreed', ARGV[3])
end
return redis.call('LRANGE', P .. 'sampled:' .. ARGV[1], 0, -1)
