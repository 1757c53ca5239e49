-- Claim files of the store that are due for deletion. Unsettled ones become due again when the claim lapses.
-- KEYS[1] prefix
-- ARGV[1] maximum number  [2] claim in ms
-- Returns their URIs
-- @include core/clock
-- Maximum delay of a deletion: a record is kept for up to two weeks.
local MAX_LIFE = 15 * 86400000
bring_near(P .. 'stored', MAX_LIFE, 0, 64)
local uris = redis.call('ZRANGEBYSCORE', P .. 'stored', '-inf', int(NOW), 'LIMIT', 0, ARGV[1])
for _, uri in ipairs(uris) do
  redis.call('ZREM', P .. 'stored', uri)
  redis.call('ZADD', P .. 'stored', int(NOW + ARGV[2]), uri)
end
return uris
