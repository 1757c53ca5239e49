-- Take a worker off the list.
-- KEYS[1] prefix
-- ARGV[1] worker id
-- Returns 1
-- @include common
local info = redis.call('GET', P .. 'worker:' .. ARGV[1])
redis.call('ZREM', P .. 'workers', ARGV[1])
redis.call('HDEL', P .. 'warm', ARGV[1])
redis.call('UNLINK', P .. 'worker:' .. ARGV[1], P .. 'about:' .. ARGV[1])
for _, model in ipairs(info and cjson.decode(info).models or {}) do
  redis.call('ZREM', P .. 'serves:' .. model, ARGV[1])
end
return 1
