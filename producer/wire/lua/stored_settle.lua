-- Files of the store that are deleted.
-- KEYS[1] prefix
-- ARGV their URIs
-- Returns how many were known
return redis.call('ZREM', P .. 'stored', unpack(ARGV))
