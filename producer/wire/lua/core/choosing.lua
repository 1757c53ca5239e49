-- @include core/hooks
-- @include core/alike
-- @include core/states
-- @include core/sweeping
-- @include core/knowing
-- @hooks on_pull
-- Choose the next lane for a worker that pulls: high before normal before low, without starvation; within a class
-- tenants by weight, within a tenant the order of submission, with a small preference for jobs that share a prefix.
-- ARGV[1] is the worker, ARGV[7] the words it knows, ARGV[8] the classes that it has capacity for, ARGV[9] and on the
--   models it serves.
local AGEING = 30000
local SHARE = 8
local OVERTAKES = 64
local REACH = 8192
local FRONT = 16
local MAX_PLACES = 64
local MAX_CHUNKS = 4
local MAX_STALE = 256
local MAX_CHANGES = 1000
local PULLER_TTL = 600000
local worker = ARGV[1]
local PULLER = P .. 'puller:' .. worker
local meta = redis.call('HMGET', P .. 'meta', 'turn', 'paused', 'rate', 'burst', 'level', 'level_at', 'cursor')
-- Each worker counts its own turns: with a common count, one of two workers that pull alternately would get every
-- second turn. A new worker starts where the last new one was after its first pull, so that one-time pullers take
-- turns.
local own = redis.call('HMGET', PULLER, 'turn', 'cursor', 'changes', 'vain')
local is_new = not own[1]
local first_turn = tonumber(own[1] or meta[1] or 0)
local turn = first_turn

local classes, models = {}, {unpack(ARGV, 9)}
local function narrow_models()
  for _, hook in ipairs(on_pull) do
    models = hook(models)
  end
end
for class in string.gmatch(ARGV[8], '%d') do
  classes[#classes + 1] = class
end
local is_urgent = #classes == 1

-- Whether the jobs of a lane, or jobs with these needs, waited for other jobs.
local function have_waited(lane)
  return string.find(lane, '^[^:]*%+after%f[^%w_]')
end

-- The first jobs of a lane as alternating names and ranks, and the jobs taken in this call.
local fronts, taken = {}, {}

-- By lane: jobs that were taken but not removed yet, and their index entries (also keyed by name). The jobs of a lane
-- are removed in groups, and before its first jobs are read again. Only the first removal of a call is immediate: after
-- it, a server at maxmemory accepts the later writes.
local leaving = {by_lane = {}}
function leaving.write(lane)
  local gone = leaving.by_lane[lane]
  if gone and #gone.names > 0 then
    redis.call('ZREM', P .. 'wait:' .. lane, unpack(gone.names))
    if #gone.places > 0 then
      redis.call('ZREM', alike_key(lane), unpack(gone.places))
    end
    leaving.by_lane[lane] = {names = {}, places = {}}
  end
end

function leaving.add(lane, name, affinity, rank)
  local gone = leaving.by_lane[lane] or {names = {}, places = {}}
  leaving.by_lane[lane] = gone
  gone.names[#gone.names + 1] = name
  if affinity and is_indexed(lane, rank) then
    local place = place_of(affinity, rank)
    gone.places[#gone.places + 1], gone.places[place] = place, true
  end
  if not leaving.has_begun or #gone.names == FRONT then
    leaving.has_begun = true
    leaving.write(lane)
  end
end

function leaving.write_all()
  for lane in pairs(leaving.by_lane) do
    leaving.write(lane)
  end
end

-- The name and rank of a lane's oldest job, or nil.
local function oldest(lane)
  local front = fronts[lane]
  while front and front.members[front.next] do
    if not taken[front.members[front.next]] then
      return front.members[front.next], tonumber(front.members[front.next + 1])
    end
    front.next = front.next + 2
  end
  leaving.write(lane)
  local members = redis.call('ZRANGE', P .. 'wait:' .. lane, 0, FRONT - 1, 'WITHSCORES')
  fronts[lane] = {members = members, next = 1}
  return members[1], tonumber(members[2])
end

-- How long a lane's oldest job has waited. Jobs are compared repeatedly until one is taken: each job's time is read
-- once.
local age
do
  local submitted = {}
  function age(lane)
    local id = split_member((oldest(lane)))
    submitted[id] = submitted[id] or tonumber(redis.call('HGET', P .. 'job:' .. id, 'at') or NOW)
    local at = submitted[id]
    -- The clock was set back since then. The waiting time is unknown, and serving the job early is better than late.
    return at > NOW and AGEING + 1 or NOW - at
  end
end

-- By model and class: the needs of waiting jobs that the worker may take, each with the key of its turns.
local places = {}
local function places_of(class, model)
  local found = places[model]
  if not found then
    found = {['0'] = {}, ['1'] = {}, ['2'] = {}, s = {}}
    places[model] = found
    local names, is_there = redis.call('ZRANGE', needs_key(model), 0, MAX_PLACES - 1), {}
    if #names == MAX_PLACES then
      -- Each call checks a different part of them, and all calls check those without words.
      local first = NOW % redis.call('ZCARD', needs_key(model))
      names = redis.call('ZRANGE', needs_key(model), first, first + MAX_PLACES - 1)
      for of in pairs(found) do
        names[#names + 1] = of .. ':1'
      end
    end
    for _, name in ipairs(names) do
      local of, needs = string.match(name, '^(%w):(.+)$')
      if not is_there[name] and knows(ARGV[7], needs) then
        local of_class = found[of]
        of_class[#of_class + 1] = {name = name, needs = needs, turns = turns_key(needs, of, model), lanes = {}}
      end
      is_there[name] = true
    end
  end
  return found[class]
end

-- By lane: its place and tenant, the increment of a turn, and turns that are not written yet. A tenant that is alone at
-- its place is not read again, and its turns are written together, before any other change to the queue's turns.
local strides = {}
local function write_turns()
  leaving.write_all()
  for _, stride in pairs(strides) do
    if stride.had > 0 then
      redis.call('ZINCRBY', stride.place.turns, stride.had * stride.by, stride.tenant)
      stride.had = 0
    end
    stride.place.alone = nil
  end
end

-- The lane of a place whose tenant is next. An empty lane loses its turn here. A call skips a limited number of tenants
-- with empty lanes; for those behind them it wakes another worker.
local MAX_SKIPPED = 1024
local skipped = 0
local function next_lane(place, class, model)
  while not place.is_empty do
    local tenant = place.alone
    if not tenant then
      local tenants = redis.call('ZRANGE', place.turns, 0, 1)
      tenant = tenants[1]
      place.alone = not tenants[2] and tenant
    end
    if not tenant then
      redis.call('ZREM', needs_key(model), place.name)
    end
    if not tenant or skipped >= MAX_SKIPPED then
      place.is_empty = true
      return nil
    end
    local lane = place.lanes[tenant] or lane_name(place.needs, class, tenant, model)
    place.lanes[tenant] = lane
    if oldest(lane) then
      return lane
    end
    place.alone = nil
    fronts[lane] = nil
    skipped = skipped + 1
    write_turns()
    redis.call('ZREM', place.turns, tenant)
  end
end

-- The next lane of a class: the models with waiting jobs take turns, and so do the needs of the jobs of each model. The
-- cursor moves past the models that were passed over, so that the next model does not get their turns.
local cursor, passed = tonumber(own[2] or meta[7] or 0), 0
local function lane_of(class)
  for i = 0, #models - 1 do
    local at = cursor + i
    local model, first, lanes = models[at % #models + 1], nil, nil
    for _, place in ipairs(places_of(class, model)) do
      local lane = not place.is_empty and next_lane(place, class, model)
      if lane and first then
        lanes = lanes or {first}
        lanes[#lanes + 1] = lane
      end
      first = first or lane
    end
    if first then
      passed = i
      return lanes and lanes[math.floor(at / #models) % #lanes + 1] or first
    end
  end
end

-- Every eighth job is the one that has waited longest, if that is long: with a steady flow of urgent jobs, the others
-- still get an eighth of the worker.
local function longest_waiting()
  local found, longest = nil, AGEING
  for _, class in ipairs(classes) do
    for _, model in ipairs(models) do
      for _, place in ipairs(places_of(class, model)) do
        local lane = next_lane(place, class, model)
        local waited = lane and age(lane)
        if waited and waited > longest then
          found, longest = lane, waited
        end
      end
    end
  end
  return found
end

-- The lane to take from, and whether the job taken must be its oldest.
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

-- How often the oldest job of a lane has been overtaken since it became the oldest.
local overtaken, touched = {}, {}

local function overtakes(lane)
  overtaken[lane] = overtaken[lane] or tonumber(redis.call('HGET', P .. 'overtaken', lane) or 0)
  return overtaken[lane]
end

-- The affinity that the worker prefers in a lane next: that of the last job it took there, whose prefix is in its
-- cache. (Tenants do not share cached blocks, so neither do lanes.) Write there to prefer certain jobs.
local wanted, changed = {}, {}
local function wanted_of(lane)
  if wanted[lane] == nil then
    wanted[lane] = redis.call('HGET', PULLER, lane)
  end
  return wanted[lane]
end

-- The first job of a lane with this affinity, within reach of the oldest: its name and rank, or nil. The index is
-- extended where it is missing, by a limited number of chunks per call.
local chunks, stale = MAX_CHUNKS, MAX_STALE
local at_end = {}
local function first_alike(lane, affinity, rank_of_oldest)
  local limit = rank_of_oldest + REACH
  while stale > 0 do
    local gone = leaving.by_lane[lane]
    local found = redis.call('ZRANGE', alike_key(lane), '[' .. affinity .. ' ', '(' .. affinity .. '!', 'BYLEX', 'LIMIT', 0,
      gone and #gone.places + 1 or 1)
    local at = 1
    while gone and found[at] and gone.places[found[at]] do
      at = at + 1
    end
    local place = found[at]
    local rank = place and rank_of(place)
    if rank then
      local name = rank <= limit and redis.call('ZRANGEBYSCORE', P .. 'wait:' .. lane, rank, rank)[1]
      if name or rank > limit then
        return name or nil, rank
      end
      -- Taken by a worker that does not use the index.
      redis.call('ZREM', alike_key(lane), place)
      stale = stale - 1
    elseif at_end[lane] or chunks == 0 then
      return nil
    else
      chunks = chunks - 1
      if redis.call('ZCARD', alike_key(lane)) > 2 * REACH then
        -- Most entries are of jobs that such workers took.
        redis.call('UNLINK', alike_key(lane))
      end
      leaving.write(lane) -- or the index would include jobs that were taken
      at_end[lane] = not extend_alike(lane, limit)
    end
  end
end

-- Jobs that waited for a job this worker ran are in lanes whose needs include `after`, under this name.
local near = near_name(worker)

-- How many jobs the worker has taken since one shared a prefix with the job before it. If there were many, the next
-- jobs are likely to differ too. The index is then only used occasionally, or when one of the next few jobs matches.
local MAX_VAIN, PROBED = 64, 2048
local vain = tonumber(own[4] or 0)
local function may_be_alike(lane, affinity)
  if vain < MAX_VAIN then
    return true
  elseif vain >= PROBED then
    vain, chunks = MAX_VAIN, math.min(chunks, 1)
    return true
  end
  local front, ending = fronts[lane], ' ' .. affinity
  for i = front.next, #front.members, 2 do
    if string.find(front.members[i], ending, 1, true) then
      return true
    end
  end
end

-- The name, rank, id and affinity of the job to take from a lane: its oldest, or the first whose parent ran here, or
-- the first with the preferred affinity. The oldest is overtaken up to 64 times, by jobs within REACH behind it.
local function candidate(lane, in_order)
  local name, rank = oldest(lane)
  local id, own = split_member(name)
  if not in_order and overtakes(lane) < OVERTAKES then
    for pass = have_waited(lane) and 1 or 2, 2 do
      local affinity = pass == 1 and near or wanted_of(lane)
      local other, its_rank
      if not affinity then
        break
      elseif own == affinity then
        vain = 0
        break
      elseif pass == 1 or may_be_alike(lane, affinity) then
        other, its_rank = first_alike(lane, affinity, rank)
      end
      if other then
        vain = 0
        return other, its_rank, split_member(other)
      end
      vain = vain + 1
    end
  end
  return name, rank, id, own
end

-- The named job has left the lane. If it was taken because it had waited longest, its affinity is not preferred next.
local function note_taken(lane, name, affinity, in_order)
  local times = name == oldest(lane) and 0 or overtakes(lane) + 1
  touched[lane] = touched[lane] or times ~= overtakes(lane)
  overtaken[lane] = times
  taken[name] = true
  if affinity and affinity ~= wanted_of(lane) and not (in_order and wanted_of(lane)) then
    wanted[lane], changed[lane] = affinity, true
  end
end

local function place_for(lane)
  local needs, class, _, model = split_lane(lane)
  for _, place in ipairs(places_of(class, model)) do
    if place.needs == needs then
      return place
    end
  end
end

-- The tenant of a lane has had a turn: a tenant of weight 3 has three turns for each turn of a tenant of weight 1.
local function note_turn(lane)
  local stride = strides[lane]
  if not stride then
    local _, _, tenant = split_lane(lane)
    local by = 1 / tonumber(redis.call('HGET', P .. 'weights', tenant) or 1)
    stride = {tenant = tenant, by = by, had = 0, place = place_for(lane)}
    strides[lane] = stride
  end
  stride.had = stride.had + 1
  if not stride.place.alone then
    write_turns()
  end
  turn = turn + 1
  cursor = cursor + passed + 1
end

-- Called once per call, after the last job was taken.
local function save_choices()
  write_turns()
  for lane, has_changed in pairs(touched) do
    if has_changed and overtaken[lane] == 0 then
      redis.call('HDEL', P .. 'overtaken', lane)
    elseif has_changed then
      redis.call('HSET', P .. 'overtaken', lane, overtaken[lane])
    end
    close_lane(lane)
  end
  if turn == first_turn then
    return
  end
  local fields = {'turn', turn, 'cursor', cursor}
  for lane in pairs(changed) do
    fields[#fields + 1] = lane
    fields[#fields + 1] = wanted[lane]
  end
  local changes = tonumber(own[3] or 0) + (#fields - 4) / 2
  if changes > MAX_CHANGES then
    -- There may be many lanes, and the cache still has the prefixes of only a few.
    redis.call('UNLINK', PULLER)
    changes = 0
  end
  fields[#fields + 1] = 'changes'
  fields[#fields + 1] = changes
  if vain ~= tonumber(own[4] or 0) then
    fields[#fields + 1] = 'vain'
    fields[#fields + 1] = vain
  end
  redis.call('HSET', PULLER, unpack(fields))
  redis.call('PEXPIRE', PULLER, PULLER_TTL)
  if is_new then
    redis.call('HSET', P .. 'meta', 'turn', turn, 'cursor', cursor)
  end
end
