-- @include core/states
-- Checks that precede every change by the worker that holds a job. They distinguish a call that was sent twice, because
-- its first reply was lost, from a call that arrives too late.
local id, token, job
local MAX_SPENT = 64 -- bytes: the server packs records whose values are not longer

-- Load the job whose id and token are the first two arguments; argument `spent` has the execution's times.
local function take_up(args, spent)
  id, token = args[1], args[2]
  job = load(id)
  if job and (args[spent] or '') ~= '' and #args[spent] <= MAX_SPENT then
    job.spent = args[spent]
  end
end

-- The reply to a call that changes nothing: already_done (this call, or the same end, arrived before) | fenced.
-- `hands_back`: the call requeues the job, so an earlier call that did so counts as the same.
local function refusal(hands_back)
  if not job then
    return 'fenced'
  elseif (hands_back and job.returned == token) or (job.token == token and not ACTIVE[job.state]) then
    return 'already_done'
  elseif job.token ~= token or job.state ~= 'running' then
    return 'fenced'
  end
end

-- A requested end has precedence over `state`. Returns it if it differs. `used`: tokens and device time of the
-- execution; its times are in `job.spent`.
local function ended_by_request(state, used)
  if job.ending and job.ending ~= state then
    job.used = used
    finish(id, job, job.ending, ENDED[job.ending])
    return job.ending
  end
end

-- The job restarts from its prompt. Call only after a removal.
local function drop_checkpoint()
  for i = 0, tonumber(job.n or 1) - 1 do
    redis.call('HDEL', P .. 'job:' .. id, 'len:' .. i)
  end
  redis.call('UNLINK', P .. 'ckpt:' .. id)
  redis.call('HDEL', P .. 'job:' .. id, 'saved')
  redis.call('HINCRBY', P .. 'job:' .. id, 'epoch', 1)
end
