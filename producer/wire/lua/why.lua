-- Return the data that explains how a job's lifetime was spent.
-- KEYS[1] prefix
-- ARGV[1] id
-- Returns nothing for an unknown job, or names and values: job (as `history`), now (ms), paused, rate_limited and
--   over_quota (spells of the pause, of the rate limit, of its tenant's quotas), served (per set of words that workers
--   know: {1 if they include all that the job needs, `<last heartbeat> <until>`, spells without such a worker}),
--   started (pairs of a lane of its model and the jobs started from it during the last wait); spells are `<from> <to>`,
--   newest first
-- @include core/knowing
-- @include executions
local MAX_MINUTES = 61
local MAX_FIELDS = 16384 -- of `started` that one call reads
local found = executions_of(ARGV[1])
if not found then
  return {}
end
local job = redis.call('HMGET', P .. 'job:' .. ARGV[1], 'lane', 'state', 'at', 'queued_at', 'started_at')
local lane, state = job[1], job[2]
local needs, _, tenant, model = split_lane(lane)

local function spells_of(name)
  return redis.call('LRANGE', P .. name, 0, -1)
end

local served = {}
local alive = redis.call('HGETALL', P .. 'alive:' .. model)
for i = 1, #alive, 2 do
  served[#served + 1] = {knows(alive[i], needs) and 1 or 0, alive[i + 1], spells_of('spells:' .. alive[i] .. ':' .. model)}
end

local starts, fields_read = {}, 0
local from = tonumber(job[4] or job[3])
local to = tonumber((state ~= 'queued' and state ~= 'delayed' and job[5]) or NOW)
local last = math.floor(to / 60000)
for minute = math.max(math.floor(from / 60000), last - MAX_MINUTES + 1), last do
  local flat = fields_read < MAX_FIELDS and redis.call('HGETALL', P .. 'started:' .. int(minute)) or {}
  fields_read = fields_read + #flat / 2
  for i = 1, #flat, 2 do
    local second, name = string.match(flat[i], '^(%d+) (.+)$')
    local at = minute * 60000 + second * 1000
    local _, _, _, of = split_lane(name)
    if at + 999 >= from and at <= to and (of or model) == model then
      starts[name] = (starts[name] or 0) + flat[i + 1]
    end
  end
end
local lanes = {}
for name, number in pairs(starts) do
  lanes[#lanes + 1] = name
  lanes[#lanes + 1] = number
end
return {
  'job', found, 'now', int(NOW), 'paused', spells_of('spells:paused'), 'rate_limited', spells_of('spells:rate'),
  'over_quota', spells_of('over:' .. tenant), 'served', served, 'started', lanes
}
