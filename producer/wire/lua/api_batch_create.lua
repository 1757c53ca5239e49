-- Open a batch of the HTTP interface for a file of its tenant. The gateway that claims it runs it.
-- KEYS[1] prefix
-- ARGV[1] id  [2] tenant  [3] file id  [4] JSON that describes it  [5] ms to keep the record  [6] ms to keep the file
--   [7] the tenant's maximum of open batches, including this one
-- Returns created | no_file | full
-- @include files
-- @include core/purged
local id, tenant, file_id = ARGV[1], ARGV[2], ARGV[3]
local key = P .. 'abatch:' .. id
if redis.call('EXISTS', key) == 1 then
  return 'created'
end
local file = find_file(tenant, file_id)
if not file then
  return 'no_file'
elseif is_purged(tenant) or tonumber(redis.call('HGET', P .. 'abopen', tenant) or 0) >= tonumber(ARGV[7]) then
  return 'full'
end
keep_until(tenant, file_id, file, math.max(file.expires, NOW + ARGV[6]))
redis.call('HINCRBY', P .. 'fileuses', file_id, 1)
redis.call('HINCRBY', P .. 'abopen', tenant, 1)
redis.call('HSET', key, 'tenant', tenant, 'file', file_id, 'doc', ARGV[4], 'status', 'validating')
redis.call('PEXPIRE', key, ARGV[5])
local index = P .. 'abatches:' .. tenant
redis.call('ZREMRANGEBYSCORE', index, '-inf', int(NOW - ARGV[5]))
redis.call('ZADD', index, int(NOW), id)
redis.call('PEXPIRE', index, ARGV[5])
redis.call('ZADD', P .. 'ableases', 0, id)
return 'created'
