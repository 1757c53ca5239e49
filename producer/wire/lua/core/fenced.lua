-- @include core/states
-- What a worker may do with a job it holds begins here: a call that was sent twice, its first reply lost, is told from one
-- that comes too late.
local id, token, job
local MAX_SPENT = 64 -- bytes: the server packs records whose values are not longer

-- Take the job up whose id is the first argument, pulled with the token behind it; argument `spent` has the execution's times.
local function take_up(args, spent)
  id, token = args[1], args[2]
  job = load(id)
  if job and (args[spent] or '') ~= '' and #args[spent] <= MAX_SPENT then
    job.spent = args[spent]
  end
end

-- The word for a call that changes nothing: already_done (this very call, or the same end, came before) | fenced.
-- `hands_back`: the call gives the job away, so one that did so before is the same one.
local function refusal(hands_back)
  if not job then
    return 'fenced'
  elseif (hands_back and job.returned == token) or (job.token == token and not ACTIVE[job.state]) then
    return 'already_done'
  elseif job.token ~= token or job.state ~= 'running' then
    return 'fenced'
  end
end

-- The end that somebody else asked for wins over `state`. Returns it if it is another one. `used`: what the execution took;
-- its times are in `job.spent`.
local function ended_by_request(state, used)
  if job.ending and job.ending ~= state then
    job.used = used
    finish(id, job, job.ending, ENDED[job.ending])
    return job.ending
  end
end

-- The job begins again from its prompt. After a removal only.
local function drop_checkpoint()
  for i = 0, tonumber(job.n or 1) - 1 do
    redis.call('HDEL', P .. 'job:' .. id, 'len:' .. i)
  end
  redis.call('UNLINK', P .. 'ckpt:' .. id)
  redis.call('HDEL', P .. 'job:' .. id, 'saved')
  redis.call('HINCRBY', P .. 'job:' .. id, 'epoch', 1)
end
