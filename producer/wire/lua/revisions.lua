-- @include core/knowing
-- Maximum number of workers' records that one call reads for each of these checks.
local MAX_ASKED = 64

-- The revisions of a model that live workers announce, separated by spaces; `name` is the last part of a lane. Only
-- lanes of pinned jobs report revisions.
local function live_revisions(name)
  local model = string.match(name, '^(.*)~')
  local found, seen = {}, {}
  local ids = model and redis.call('ZRANGEBYSCORE', P .. 'serves:' .. model, int(NOW), '+inf', 'LIMIT', 0, MAX_ASKED)
  for _, id in ipairs(ids or {}) do
    local info = redis.call('GET', P .. 'worker:' .. id)
    local revision = info and cjson.decode(info).revision or ''
    if revision ~= '' and not seen[revision] then
      seen[revision] = true
      found[#found + 1] = revision
    end
  end
  table.sort(found)
  return table.concat(found, ' ')
end

-- Whether none of the live workers that serve a lane knows all that its jobs need. Unknown counts as known: a call
-- reads few workers' records, and stops at the first that knows all words.
local unmet, num_read = {}, 0
local function is_unmet(lane)
  local needs, _, _, name = split_lane(lane)
  local key = needs .. ':' .. name
  if needs == '1' or unmet[key] ~= nil then
    return unmet[key] or false
  end
  unmet[key] = true
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'serves:' .. name, int(NOW), '+inf', 'LIMIT', 0, MAX_ASKED + 1)) do
    num_read = num_read + 1
    if num_read > MAX_ASKED or record_knows(redis.call('GET', P .. 'worker:' .. id), needs) then
      unmet[key] = false
      break
    end
  end
  return unmet[key]
end
