-- Definitions that all scripts share. KEYS[1] is the queue's prefix `pagemill:{<queue>}:`; every other name is that
-- prefix and a word (producer/wire/schema/keys.py). Times are milliseconds by the server's clock.
local P = KEYS[1]
local clock = redis.call('TIME')
local NOW = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- The due time of a job that waits for others; it is never reached.
local HELD = 9e15

-- A whole number as text: tostring() would write 1.7e+12.
local function int(number)
  return string.format('%.0f', number)
end

local NOW_TEXT = int(NOW)

-- The waiting set of a job. After three crashes a job is a suspect (poison job), and suspects wait in a separate lane.
local function waiting_lane(lane, crashes)
  if tonumber(crashes or 0) >= 3 then
    return (string.gsub(lane, '^([^:]+):%w', '%1:s'))
  end
  return lane
end

-- The member for a job in its waiting set: it includes the affinity, so that pull reads both together.
local function member(id, affinity)
  return affinity and id .. ' ' .. affinity or id
end

-- The id, and the affinity or nil.
local function split_member(name)
  local id, affinity = string.match(name, '^(%S*) ?(%S*)$')
  return id, affinity ~= '' and affinity or nil
end

-- Takes the place of the affinity in a waiting set, for a job whose prefix that worker computed for its parent.
local function near_name(worker)
  local hash = 0
  for i = 1, #worker do
    hash = (hash * 31 + string.byte(worker, i)) % 1048573
  end
  return string.format('w%05x', hash)
end

local function split_lane(lane)
  return string.match(lane, '^([^:]+):(%w):([^:]+):(.+)$')
end

local function lane_name(needs, class, tenant, model)
  return needs .. ':' .. class .. ':' .. tenant .. ':' .. model
end

local function turns_key(needs, class, model)
  return P .. 'turns:' .. needs .. ':' .. class .. ':' .. model
end

-- The classes and needs of a model's waiting jobs, as `<class>:<needs>`, all scores 0: each has a `turns_key`. If one
-- is empty, the next pull that knows the words removes it here.
local function needs_key(model)
  return P .. 'needs:' .. model
end

-- Wake an idle worker. The list is capped and short-lived: it is only a hint, since workers also poll.
local function ring(model)
  local bell = P .. 'bell:' .. model
  redis.call('LPUSH', bell, '1')
  redis.call('LTRIM', bell, 0, 15)
  redis.call('PEXPIRE', bell, 60000)
end

local has_opened

-- Make a lane known to pull. A newly waiting tenant is level with the tenant that is next.
local function open_lane(lane)
  local needs, class, tenant, model = split_lane(lane)
  local turns = turns_key(needs, class, model)
  local first = redis.call('ZRANGE', turns, 0, 0, 'WITHSCORES')
  redis.call('SADD', P .. 'lanes', lane)
  redis.call('ZADD', needs_key(model), 0, class .. ':' .. needs)
  redis.call('ZADD', turns, 'NX', first[2] or '0', tenant)
  has_opened = true
  ring(model)
end
-- @level
