-- Return the canary state of a worker. From its first call on, the jobs that it commits are listed.
-- KEYS[1] prefix
-- ARGV[1] worker  [2] key of its computation  [3] maximum bytes of inputs to keep until its next clean canary
--   [4] 1: include the answers so far
-- Returns names and values: state (quarantined | disputed | kept | ''), reason, is_wanted (1 if its answer is needed
--   now), position (number of committed jobs), has_more (1 if the call must be repeated), answers
-- @include audits
-- @include trails
redis.call('HDEL', P .. 'meta', '') -- a removal, so that the later writes pass at maxmemory
local worker, what = ARGV[1], ARGV[2]
local key, agreed = P .. 'audit:' .. worker, P .. 'agreed:' .. what
redis.call('HSET', key, 'what', what, 'room', ARGV[3])
local position, has_more = trails.trim(worker)
audits.keep_worker(worker)
local known = redis.call('HMGET', key, 'state', 'reason')
local asked = redis.call('HMGET', agreed, 'disputed', 'answers', 'w:' .. worker)
local answers = {}
if ARGV[4] == '1' then
  for i = 1, tonumber(asked[2] or 0) do
    answers[i] = redis.call('HGET', agreed, 'a' .. i)
  end
end
return {
  'state', known[1] or '', 'reason', known[2] or '', 'is_wanted', asked[1] and not asked[3] and 1 or 0,
  'position', position, 'has_more', has_more and 1 or 0, 'answers', answers
}
