-- The answers to a command so far.
-- KEYS[1] prefix
-- ARGV[1] the command's id
-- Returns worker ids and answers, one after the other
-- @include common
return redis.call('HGETALL', P .. 'answers:' .. ARGV[1])
