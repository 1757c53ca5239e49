-- Which waiting jobs of a lane begin alike. `alike:<lane>` is a sorted set of `<affinity> <rank>`, all scores 0, so that the
-- jobs of an affinity are one range in the order of their ranks. It has every job with an affinity up to its frontier, the
-- member `! <rank>`, which sorts first; pull moves that on as far as it looks for something (choosing.lua), so nothing
-- is written for a job at its submit. Who does not know of the index leaves entries of jobs that have gone, and
-- jobs without one: readers drop the former, and the latter wait for their turn.
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

-- A job has come to the lane, perhaps back to its old rank.
local function add_alike(lane, affinity, rank)
  local frontier = affinity and frontier_of(lane)
  if frontier and tonumber(rank) <= frontier then
    redis.call('ZADD', alike_key(lane), 0, place_of(affinity, rank))
  end
end

-- Frontiers by lane, as far as this call has asked; false where there is no index. No job behind its frontier is in it.
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

-- Move the frontier on by some jobs, to `limit` at most. Returns whether there may be more behind it. Needs a lane in which
-- jobs wait.
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
  -- The removal comes first: a server at maxmemory lets the rest through.
  redis.call('ZREM', key, place_of('!', frontier or 0))
  redis.call('ZADD', key, unpack(entries))
  redis.call('PEXPIRE', key, ALIKE_TTL)
  indexed[lane] = tonumber(found[#found])
  return #found == 2 * ALIKE_CHUNK
end
