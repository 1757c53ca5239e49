-- Answer a command.
-- KEYS[1] prefix
-- ARGV[1] the command's id  [2] the worker's id  [3] its answer, as JSON
-- Returns 1
-- @include common
local KEPT = 60000
redis.call('HSET', P .. 'answers:' .. ARGV[1], ARGV[2], ARGV[3])
redis.call('PEXPIRE', P .. 'answers:' .. ARGV[1], KEPT)
return 1
