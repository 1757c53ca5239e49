-- @include sweeping
-- Whose turn it is for a worker that pulls: high before normal before low, but nothing starves; inside a class
-- tenants by weight, inside a tenant the submit sequence, bent a little towards jobs that share a prefix.
-- ARGV[1] is the worker, ARGV[7] the envelope versions it reads, ARGV[8] the classes that it has
-- room for, ARGV[9] and on the models it serves.
local AGEING = 30000
local SHARE = 8
local WINDOW = 64
local WARM_TTL = 600000
local worker = ARGV[1]
local meta = redis.call('HMGET', P .. 'meta', 'turn', 'paused', 'rate', 'burst', 'level', 'level_at', 'cursor')
local turn = tonumber(meta[1] or 0)

-- A job with an adapter waits in a lane of its own, `<model>#<adapter>`, of version 5, or 8 if it lies in a store, and
-- nothing else does: there is no need to look at the other versions for each of perhaps hundreds of adapters.
local versions, adapted, classes, models = {}, {}, {}, {unpack(ARGV, 9)}
for class in string.gmatch(ARGV[8], '%d') do
  classes[#classes + 1] = class
end
local is_urgent = #classes == 1
for version in string.gmatch(ARGV[7], '%d+') do
  if version ~= '5' then
    versions[#versions + 1] = version
  end
  if version == '5' or version == '8' then
    adapted[#adapted + 1] = version
  end
end
local function versions_of(model)
  return string.find(model, '#', 1, true) and adapted or versions
end

-- The first 64 jobs of a lane; false in the place of one that was taken in this call.
local windows = {}
local function window(lane)
  local seen = windows[lane]
  if not seen or seen.left == 0 then
    local members = redis.call('ZRANGE', P .. 'wait:' .. lane, 0, WINDOW - 1)
    seen = {members = members, first = 1, left = #members}
    windows[lane] = seen
  end
  return seen
end

-- The place in its window of the oldest job of a lane that has one.
local function oldest(lane)
  local seen = window(lane)
  while not seen.members[seen.first] do
    seen.first = seen.first + 1
  end
  return seen.first
end

local function age(lane)
  local id = split_member(window(lane).members[oldest(lane)])
  local at = tonumber(redis.call('HGET', P .. 'job:' .. id, 'at') or NOW)
  -- The clock was set back since: how long is not known, but it is better served now than after that time.
  return at > NOW and AGEING + 1 or NOW - at
end

-- The lane of a class and model whose tenant's turn it is. One that has run empty loses its place here.
local nobody_waits = {}
-- Places that one call looks at in vain; the doorbell is rung for what is behind them.
local MAX_SKIPPED = 1024
local skipped = 0
local function next_lane(version, class, model)
  local turns = turns_key(version, class, model)
  while not nobody_waits[turns] do
    local tenant = redis.call('ZRANGE', turns, 0, 0)[1]
    if not tenant or skipped >= MAX_SKIPPED then
      nobody_waits[turns] = true
      return nil
    end
    local lane = lane_name(version, class, tenant, model)
    if window(lane).left > 0 then
      return lane
    end
    windows[lane] = nil
    skipped = skipped + 1
    redis.call('ZREM', turns, tenant)
  end
end

-- The next lane of a class: the models for which jobs wait take turns, and for each model its versions. The cursor
-- moves past the models that were passed over, so that the next in line does not get their turns.
local cursor, passed = tonumber(meta[7] or 0), 0
local function lane_of(class)
  for i = 0, #models - 1 do
    local at = cursor + i
    local model, lanes = models[at % #models + 1], {}
    for _, version in ipairs(versions_of(model)) do
      lanes[#lanes + 1] = next_lane(version, class, model)
    end
    if #lanes > 0 then
      passed = i
      return lanes[math.floor(at / #models) % #lanes + 1]
    end
  end
end

-- Every eighth job is the one that has waited longest, once that is long: a steady flow of urgent jobs leaves
-- the others an eighth of the worker, and never nothing.
local function longest_waiting()
  local found, longest = nil, AGEING
  for _, class in ipairs(classes) do
    for _, model in ipairs(models) do
      for _, version in ipairs(versions_of(model)) do
        local lane = next_lane(version, class, model)
        local waited = lane and age(lane)
        if waited and waited > longest then
          found, longest = lane, waited
        end
      end
    end
  end
  return found
end

-- The lane to take from, and whether its oldest job must be the one.
local function choose()
  local lane = not is_urgent and turn % SHARE == SHARE - 1 and longest_waiting()
  if lane then
    passed = -1
    return lane, true
  end
  for _, class in ipairs(classes) do
    lane = lane_of(class)
    if lane then
      return lane, false
    end
  end
end

-- What the worker ran last: the prefix that its cache has.
local warm = redis.call('HGET', P .. 'warm', worker)
local was_warm = warm
-- How often the oldest job of a lane was overtaken since it became that.
local overtaken, touched = {}, {}

local function overtakes(lane)
  overtaken[lane] = overtaken[lane] or tonumber(redis.call('HGET', P .. 'overtaken', lane) or 0)
  return overtaken[lane]
end

-- The places of a window's jobs by their affinity, in order.
local function places(seen)
  seen.places = {}
  for i, name in ipairs(seen.members) do
    local _, affinity = split_member(name or '')
    if affinity then
      seen.places[affinity] = seen.places[affinity] or {next = 1}
      table.insert(seen.places[affinity], i)
    end
  end
  return seen.places
end

-- The place of the job to take from a lane: its oldest, or the first in the window with the warm prefix. The
-- oldest is overtaken 64 times at most.
local function candidate(lane, in_order)
  local at = oldest(lane)
  if not warm or in_order then
    return at
  end
  local seen = window(lane)
  local _, affinity = split_member(seen.members[at])
  if affinity == warm then
    return at
  end
  local same = (seen.places or places(seen))[warm]
  while same and same[same.next] do
    local place = same[same.next]
    if seen.members[place] then
      return overtakes(lane) < WINDOW and place or at
    end
    same.next = same.next + 1
  end
  return at
end

-- The job at that place has left the lane.
local function note_taken(lane, at, affinity)
  local seen = window(lane)
  local times = at == seen.first and 0 or overtakes(lane) + 1
  touched[lane] = touched[lane] or times ~= overtakes(lane)
  overtaken[lane] = times
  seen.members[at] = false
  seen.left = seen.left - 1
  warm = affinity or warm
end

-- The tenant of a lane has had a turn: one of weight 3 has three while one of weight 1 has one.
local strides = {}
local function note_turn(lane)
  local stride = strides[lane]
  if not stride then
    local version, class, tenant, model = split_lane(lane)
    local weight = tonumber(redis.call('HGET', P .. 'weights', tenant) or 1)
    stride = {turns = turns_key(version, class, model), tenant = tenant, by = 1 / weight}
    strides[lane] = stride
  end
  redis.call('ZINCRBY', stride.turns, stride.by, stride.tenant)
  turn = turn + 1
  cursor = cursor + passed + 1
end

-- Once per call, after the last job was taken.
local function save_choices()
  if turn ~= tonumber(meta[1] or 0) then
    redis.call('HSET', P .. 'meta', 'turn', turn, 'cursor', cursor)
  end
  for lane, has_changed in pairs(touched) do
    if has_changed and overtaken[lane] == 0 then
      redis.call('HDEL', P .. 'overtaken', lane)
    elseif has_changed then
      redis.call('HSET', P .. 'overtaken', lane, overtaken[lane])
    end
    close_lane(lane)
  end
  if warm ~= was_warm then
    redis.call('HSET', P .. 'warm', worker, warm)
    redis.call('PEXPIRE', P .. 'warm', WARM_TTL)
  end
end
