-- Return the canary's jobs with kept input, or record the outcome of comparing them.
-- KEYS[1] prefix
-- ARGV[1] model  [2] number of compared jobs and [3] of those that agreed; '' to only return the jobs
-- Returns ids
if ARGV[2] ~= '' and redis.call('EXISTS', P .. 'rollout:' .. ARGV[1]) == 1 then
  redis.call('HSET', P .. 'rollout:' .. ARGV[1], 'compared', ARGV[2], 'agreed', ARGV[3])
end
return redis.call('LRANGE', P .. 'sampled:' .. ARGV[1], 0, -1)
