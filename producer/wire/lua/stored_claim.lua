-- Take files of the store that are to be deleted. What is not settled comes again when its claim lapses.
-- KEYS[1] prefix
-- ARGV[1] how many at most  [2] claim in ms
-- Returns their URIs
-- @include core/clock
-- None is put off for longer: a record lives for two weeks at most.
local MAX_LIFE = 15 * 86400000
bring_near(P .. 'stored', MAX_LIFE, 0, 64)
local uris = redis.call('ZRANGEBYSCORE', P .. 'stored', '-inf', int(NOW), 'LIMIT', 0, ARGV[1])
for _, uri in ipairs(uris) do
  redis.call('ZREM', P .. 'stored', uri)
  redis.call('ZADD', P .. 'stored', int(NOW + ARGV[2]), uri)
end
return uris
