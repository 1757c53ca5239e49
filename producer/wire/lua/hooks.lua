-- Change and return the webhooks of a tenant. They are deleted 400 days after the last call.
-- KEYS[1] prefix
-- ARGV[1] tenant  [2] the id of one to change, or ''  [3] its value, '' to remove it  [4] the tenant's maximum
-- Returns {1, or 0: the change was not made, because the id is unknown, there are too many, or the tenant is being
--   removed, {id, value, ...}}
-- @include core/purged
local HOOKS_TTL = 34560000000
local key, done = P .. 'hooks:' .. ARGV[1], 1
if ARGV[2] ~= '' and ARGV[3] == '' then
  done = redis.call('HDEL', key, ARGV[2])
elseif ARGV[2] ~= '' and (is_purged(ARGV[1]) or redis.call('HLEN', key) >= tonumber(ARGV[4])) then
  done = 0
elseif ARGV[2] ~= '' then
  redis.call('HSET', key, ARGV[2], ARGV[3])
end
redis.call('PEXPIRE', key, HOOKS_TTL)
return {done, redis.call('HGETALL', key)}
