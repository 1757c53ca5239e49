-- List the jobs of a list that match a filter, without prompts and outputs.
-- KEYS[1] prefix
-- ARGV[1] the list: running | delayed | dead | lane:<lane> | batch:<id> | key:<tenant>:<idempotency key> | all
-- ARGV[2] where to continue, '0' for the start  [3] number to read  [4] maximum number to return, unless all
-- ARGV[5] state, [6] tenant, [7] model, [8] key or idempotency key: only matching jobs; '' for any
-- Returns {where to continue, or '' at the end, jobs read, {{id, names and values of some fields}...}}. `all` walks the
--   keyspace of the server with SCAN, so its order is undefined and a job may be returned twice.
local list, start, look, most = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local state, tenant, model, key = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local FIELDS = {
  'state', 'lane', 'at', 'started_at', 'finished_at', 'due_at', 'worker', 'attempt', 'crashes', 'batch', 'key',
  'progress', 'progress_at', 'idem'
}

-- The ids to read, the position after each, and the position after all of them, or ''.
local function ids_of()
  local name, rest = string.match(list, '^(%l+):?(.*)$')
  local ids, places, after = {}, {}, nil
  if name == 'all' then
    local job = P .. 'job:'
    local page = redis.call('SCAN', start, 'MATCH', job .. '*', 'COUNT', look)
    for i, found in ipairs(page[2]) do
      ids[i] = string.sub(found, #job + 1)
    end
    return ids, nil, page[1] ~= '0' and page[1] or ''
  elseif name == 'key' then
    ids[1] = redis.call('GET', P .. 'idem:' .. rest) or nil
    return ids, nil, ''
  elseif name == 'lane' then
    local flat = redis.call('ZRANGEBYSCORE', P .. 'wait:' .. rest, '(' .. start, '+inf', 'WITHSCORES', 'LIMIT', 0, look)
    for i = 1, #flat, 2 do
      ids[#ids + 1] = split_member(flat[i])
      places[#places + 1] = flat[i + 1]
    end
  else
    local last = start + look - 1
    if name == 'batch' then
      ids = redis.call('LRANGE', P .. 'bjobs:' .. rest, start, last)
    elseif name == 'dead' then
      ids = redis.call('ZREVRANGE', P .. 'dead', start, last)
    else
      ids = redis.call('ZRANGE', P .. (name == 'running' and 'leases' or 'delayed'), start, last)
    end
    for i = 1, #ids do
      places[i] = int(start + i)
    end
  end
  after = #ids == look and places[#places] or ''
  return ids, places, after
end

local ids, places, after = ids_of()
local rows, looked = {}, #ids
for i, id in ipairs(ids) do
  local job = redis.call('HMGET', P .. 'job:' .. id, unpack(FIELDS))
  local _, _, own_tenant, own_model = split_lane(string.match(job[2] or '', '^[^~]*')) -- without a pinned revision
  if own_tenant and (state == '' or job[1] == state) and (tenant == '' or own_tenant == tenant)
    and (model == '' or own_model == model)
    and (key == '' or job[11] == key or job[14] == own_tenant .. ':' .. key) then
    local row = {id}
    for place = 1, #FIELDS - 1 do
      if job[place] then
        row[#row + 1] = FIELDS[place]
        row[#row + 1] = job[place]
      end
    end
    rows[#rows + 1] = row
    if places and #rows >= most and i < #ids then
      after, looked = places[i], i
      break
    end
  end
end
return {after, looked, rows}
