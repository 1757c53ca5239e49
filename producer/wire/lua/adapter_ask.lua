-- Send a command to workers.
-- KEYS[1] prefix
-- ARGV[1] the command's id  [2] its time to live in ms; then each worker's id and the command for it
-- Returns the number of workers it was sent to; 0 if it was sent before
if not redis.call('SET', P .. 'asked:' .. ARGV[1], '1', 'NX', 'PX', ARGV[2]) then
  return 0
end
for i = 3, #ARGV, 2 do
  local commands = P .. 'commands:' .. ARGV[i]
  redis.call('RPUSH', commands, ARGV[i + 1])
  redis.call('LTRIM', commands, -64, -1)
  redis.call('PEXPIRE', commands, ARGV[2])
end
return (#ARGV - 2) / 2
