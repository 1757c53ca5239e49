-- Record a worker's answer to the canaries.
-- KEYS[1] prefix
-- ARGV[1] worker  [2] key of its computation  [3] its answer, or the earlier one that it agrees with  [4] number of
--   answers compared with  [5] the position that audit_look returned before the canary
-- Returns {clean (others gave the same answer) | alone (no other worker has answered yet) | disputed (a third must
--   decide) | deviates | changed (new answers have arrived: compare again), why}
-- @include audits
local MAX_ANSWERS, MAX_VOTERS = 8, 256
local DIFFERS = 'its canary differs from what other workers agree on'
local CHANGED = 'its canary differs from its own earlier one'
local TIED = 'its canary differs from that of another worker, and no third one has decided'

local worker, what, answer = ARGV[1], ARGV[2], ARGV[3]
local key = P .. 'agreed:' .. what
local known, votes, num_votes = {}, {}, 0
local flat = redis.call('HGETALL', key)
for i = 1, #flat, 2 do
  local voter = string.match(flat[i], '^w:(.*)$')
  if voter then
    votes[voter], num_votes = flat[i + 1], num_votes + 1
  else
    known[flat[i]] = flat[i + 1]
  end
end
local num_answers = tonumber(known.answers or 0)
local state, reason = unpack(redis.call('HMGET', P .. 'audit:' .. worker, 'state', 'reason'))
if state == 'quarantined' then
  return {'deviates', reason}
elseif tonumber(ARGV[4]) ~= num_answers then
  return {'changed', ''}
end

redis.call('HDEL', P .. 'meta', '') -- a removal, so that the later writes pass at maxmemory
local own
for i = 1, num_answers do
  own = known['a' .. i] == answer and tostring(i) or own
end
if (votes[worker] and votes[worker] ~= own) or (known.agreed and known.agreed ~= own)
  or (not own and num_answers == MAX_ANSWERS) then
  reason = votes[worker] and CHANGED or DIFFERS
  audits.accuse(worker, what, 'quarantined', reason)
  return {'deviates', reason}
end
if not own then
  own = tostring(num_answers + 1)
  redis.call('HSET', key, 'answers', own, 'a' .. own, answer)
end
if not votes[worker] and num_votes < MAX_VOTERS then
  votes[worker] = own
  redis.call('HSET', key, 'w:' .. worker, own)
end
audits.keep_agreed(what)

local same, is_tied = known.agreed and 2 or 0, false
for _, vote in pairs(votes) do
  same = same + (vote == own and 1 or 0)
  is_tied = is_tied or vote ~= own
end
if same >= 2 then
  if not known.agreed then
    redis.call('HSET', key, 'agreed', own)
    redis.call('HDEL', key, 'disputed')
    for voter, vote in pairs(votes) do
      if vote == own then
        audits.acquit(voter)
      else
        audits.accuse(voter, what, 'quarantined', DIFFERS)
      end
    end
  end
  redis.call('HSET', P .. 'audit:' .. worker, 'clean_at', NOW_TEXT, 'clean_to', ARGV[5])
  audits.keep_worker(worker)
  return {'clean', ''}
elseif not is_tied then
  return {'alone', ''}
end
redis.call('HSET', key, 'disputed', 1)
for voter, _ in pairs(votes) do
  audits.accuse(voter, what, 'disputed', TIED)
end
return {'disputed', TIED}
