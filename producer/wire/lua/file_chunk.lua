-- Store a chunk of an unfinished file.
-- KEYS[1] prefix
-- ARGV[1] file id  [2] number, from 0  [3] ms for the upload  [4] bytes  [5] tenant
-- Returns 1, or 0: the file was deleted meanwhile
if not redis.call('HGET', P .. 'files:' .. ARGV[5], ARGV[1]) then
  return 0
end
redis.call('SET', P .. 'file:' .. ARGV[1] .. ':' .. ARGV[2], ARGV[4], 'PX', ARGV[3])
return 1
