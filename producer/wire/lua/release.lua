-- Hand a running job back: it waits at its old rank, and nothing is counted.
-- KEYS[1] prefix
-- ARGV[1] id  [2] token
-- Returns released | already_done (this very call came before) | fenced | cancelled | expired
-- @include fenced
take_up(ARGV)
local word = refusal(true) or ended_by_request()
if word then
  return word
end
redis.call('HDEL', P .. 'job:' .. id, 'token')
remember(id, job, 'released')
enqueue(id, job)
redis.call('HSET', P .. 'job:' .. id, 'returned', token)
return 'released'
