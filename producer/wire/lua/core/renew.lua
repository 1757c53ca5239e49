-- Extend leases whose token is current: a worker cannot take back a job that another worker holds.
-- KEYS[1] prefix
-- ARGV[1] lease in ms; then job id and token of each job held
-- Returns {lost ids, ids to be stopped}
local lost, stop, renewed = {}, {}, {}
for i = 2, #ARGV, 2 do
  local job = redis.call('HMGET', P .. 'job:' .. ARGV[i], 'state', 'token', 'ending')
  if job[1] ~= 'running' or job[2] ~= ARGV[i + 1] then
    lost[#lost + 1] = ARGV[i]
  else
    renewed[#renewed + 1] = ARGV[i]
    if job[3] then
      stop[#stop + 1] = ARGV[i]
    end
  end
end
local expiry = int(NOW + ARGV[1])
for _, id in ipairs(renewed) do
  -- The removal comes first, so that the write passes at maxmemory.
  redis.call('ZREM', P .. 'leases', id)
  redis.call('ZADD', P .. 'leases', expiry, id)
end
return {lost, stop}
