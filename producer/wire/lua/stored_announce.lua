-- Announce files that will be written to the store: those without a reference by the given time are deleted again.
-- KEYS[1] prefix
-- ARGV[1] ms from now  [2] and on: their URIs
-- Returns 1
-- A removal, so that the later writes pass at maxmemory: a running job's result may come next.
redis.call('HDEL', P .. 'meta', '')
for i = 2, #ARGV do
  redis.call('ZADD', P .. 'stored', int(NOW + ARGV[1]), ARGV[i])
end
return 1
