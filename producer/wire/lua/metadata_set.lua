-- Replace the metadata of a job that has some.
-- KEYS[1] prefix
-- ARGV[1] tenant  [2] id  [3] the metadata
-- Returns 1, or 0: the tenant has no such job
local _, _, tenant = split_lane(redis.call('HGET', P .. 'job:' .. ARGV[2], 'lane') or '')
if tenant ~= ARGV[1] then
  return 0
end
return redis.call('SET', P .. 'md:' .. ARGV[2], ARGV[3], 'XX', 'KEEPTTL') and 1 or 0
