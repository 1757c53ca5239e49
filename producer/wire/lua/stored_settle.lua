-- Remove deleted files of the store from the list.
-- KEYS[1] prefix
-- ARGV their URIs
-- Returns the number that were in the list
return redis.call('ZREM', P .. 'stored', unpack(ARGV))
