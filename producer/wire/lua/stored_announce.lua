-- Say that files are about to be written to the store: those that nothing refers to by then are deleted again.
-- KEYS[1] prefix
-- ARGV[1] ms from now  [2] and on: their URIs
-- Returns 1
-- A removal, so that the rest passes at maxmemory: a running job's result may come next.
redis.call('HDEL', P .. 'meta', '')
for i = 2, #ARGV do
  redis.call('ZADD', P .. 'stored', int(NOW + ARGV[1]), ARGV[i])
end
return 1
