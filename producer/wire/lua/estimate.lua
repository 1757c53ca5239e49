-- Return data to predict when a job submitted to a lane now ends. Only reads, and a bounded part of the queue.
-- KEYS[1] prefix
-- ARGV[1] the lane
-- Returns names and values: now (ms), paused (0 or 1), rate (the limit in jobs per second, or ''), running (jobs),
--   lanes ({class, tenant, weight, jobs that wait, costs of an evenly spaced sample of them} per lane of the model with
--   the same or a higher class), workers (reports of the model's live workers, as JSON), kept_now (accuracy of
--   estimates for jobs that start immediately), kept_later (the same for jobs that wait), quotas (the tenant's line as
--   submit returns it, or '')
-- @include features/quotas
local MAX_LANES, MAX_WORKERS, PER_LANE = 256, 64, 16
local samples = 512
local own_needs, class, own, model = split_lane(ARGV[1])
local lanes, has_seen = {}, {}

local function sampled(key, jobs)
  local costs, count = {}, math.min(jobs, PER_LANE, samples)
  samples = samples - count
  for i = 0, count - 1 do
    local name = redis.call('ZRANGE', key, math.floor(i * jobs / count), math.floor(i * jobs / count))[1]
    costs[#costs + 1] = redis.call('HGET', P .. 'job:' .. split_member(name), 'cost') or '0'
  end
  return costs
end

local function look_at(needs, level, tenant)
  local lane = lane_name(needs, level, tenant, model)
  if level > class or has_seen[lane] then
    return
  end
  has_seen[lane] = true
  local key = P .. 'wait:' .. lane
  local jobs = redis.call('ZCARD', key)
  if #lanes < MAX_LANES and (jobs > 0 or lane == ARGV[1]) then
    local weight = redis.call('HGET', P .. 'weights', tenant) or '1'
    lanes[#lanes + 1] = {level, tenant, weight, jobs, sampled(key, jobs)}
  end
end

for _, level in ipairs({'0', '1', '2'}) do
  look_at(own_needs, level, own)
end
for _, name in ipairs(redis.call('ZRANGE', needs_key(model), 0, MAX_LANES - 1)) do
  local level, needs = string.match(name, '^(%w):(.+)$')
  look_at(needs, level, own)
  for _, tenant in ipairs(level <= class and redis.call('ZRANGE', turns_key(needs, level, model), 0, MAX_LANES - 1) or {}) do
    look_at(needs, level, tenant)
  end
end
local workers = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'serves:' .. model, int(NOW), '+inf', 'LIMIT', 0, MAX_WORKERS)) do
  workers[#workers + 1] = redis.call('GET', P .. 'worker:' .. id) or nil
end
local meta = redis.call('HMGET', P .. 'meta', 'paused', 'rate')
return {
  'now', int(NOW), 'paused', meta[1] == '1' and 1 or 0, 'rate', meta[2] or '', 'running', redis.call('ZCARD', P .. 'leases'),
  'lanes', lanes, 'workers', workers, 'kept_now', redis.call('LRANGE', P .. 'kept:now:' .. model, 0, -1),
  'kept_later', redis.call('LRANGE', P .. 'kept:later:' .. model, 0, -1),
  'quotas', has_quotas() and new_quotas().line(own) or ''
}
