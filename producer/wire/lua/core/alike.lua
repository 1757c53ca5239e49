-- Index of the waiting jobs of a lane that share a prefix. `alike:<lane>` is a sorted set of `<affinity> <rank>`, all
-- scores 0, so that the jobs of an affinity form one range ordered by rank. It contains every job with an affinity up
-- to its frontier, the member `! <rank>`, which sorts first. A pull moves the frontier only as far as it searches
-- (choosing.lua), so a submission writes nothing. A worker that does not know the index leaves entries of removed jobs,
-- and jobs without an entry: readers drop the former, and the latter wait for their turn.
local ALIKE_TTL = 600000
local ALIKE_CHUNK = 256

local function alike_key(lane)
  return P .. 'alike:' .. lane
end

local function place_of(affinity, rank)
  return string.format('%s %016.0f', affinity, rank)
end

local function rank_of(place)
  return tonumber(string.match(place, '%d+$'))
end

local function frontier_of(lane)
  local first = redis.call('ZRANGE', alike_key(lane), 0, 0)[1]
  return first and rank_of(first)
end

-- A job has entered the lane, perhaps at its earlier rank.
local function add_alike(lane, affinity, rank)
  local frontier = affinity and frontier_of(lane)
  if frontier and tonumber(rank) <= frontier then
    redis.call('ZADD', alike_key(lane), 0, place_of(affinity, rank))
  end
end

-- Frontiers by lane, as read in this call; false where there is no index. The index has no job behind its frontier.
local indexed = {}

local function is_indexed(lane, rank)
  if indexed[lane] == nil then
    indexed[lane] = frontier_of(lane) or false
  end
  return indexed[lane] and tonumber(rank) <= indexed[lane]
end

local function remove_alike(lane, affinity, rank)
  if affinity and is_indexed(lane, rank) then
    redis.call('ZREM', alike_key(lane), place_of(affinity, rank))
  end
end

-- Move the frontier forward by some jobs, at most to `limit`. Returns whether there may be more jobs behind it. Jobs
-- must be waiting in the lane.
local function extend_alike(lane, limit)
  local key = alike_key(lane)
  local frontier = frontier_of(lane)
  local from = frontier and '(' .. int(frontier) or '-inf'
  local found = redis.call('ZRANGEBYSCORE', P .. 'wait:' .. lane, from, int(limit), 'WITHSCORES', 'LIMIT', 0, ALIKE_CHUNK)
  if #found == 0 then
    return false
  end
  local entries = {'0', place_of('!', found[#found])}
  for i = 1, #found, 2 do
    local _, affinity = split_member(found[i])
    if affinity then
      entries[#entries + 1] = '0'
      entries[#entries + 1] = place_of(affinity, found[i + 1])
    end
  end
  -- The removal comes first, so that the later writes pass at maxmemory.
  redis.call('ZREM', key, place_of('!', frontier or 0))
  redis.call('ZADD', key, unpack(entries))
  redis.call('PEXPIRE', key, ALIKE_TTL)
  indexed[lane] = tonumber(found[#found])
  return #found == 2 * ALIKE_CHUNK
end
