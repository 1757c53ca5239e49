-- List the batches of a queue, the most recently extended or ended one first, without purged ones.
-- KEYS[1] prefix
-- ARGV[1] number to skip  [2] maximum number, up to 250
-- Returns {total number, names and values of each: id, counts (names of batch_counts, and created_at), lane (of its
--   first job or ''), tenant (of all of its jobs, * for several tenants, or '')}
local first, most = tonumber(ARGV[1]), math.min(tonumber(ARGV[2]), 250)
local found = {redis.call('ZCARD', P .. 'bexpiry')}
for _, id in ipairs(redis.call('ZREVRANGE', P .. 'bexpiry', first, first + most - 1)) do
  local first_job = redis.call('LRANGE', P .. 'bjobs:' .. id, 0, 0)[1]
  local lane = first_job and redis.call('HGET', P .. 'job:' .. first_job, 'lane') or ''
  found[#found + 1] = {
    'id', id, 'counts', redis.call('HGETALL', P .. 'batch:' .. id), 'lane', lane,
    'tenant', redis.call('GET', P .. 'bowner:' .. id) or ''
  }
end
return found
