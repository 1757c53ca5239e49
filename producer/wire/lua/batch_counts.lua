-- How many jobs of a batch are in which state. They sum to the total, since one script changes both.
-- KEYS[1] prefix
-- ARGV[1] batch id
-- Returns the names and counts in turn; nothing for an unknown batch
return redis.call('HGETALL', P .. 'batch:' .. ARGV[1])
