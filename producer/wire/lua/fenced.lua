-- @include states
-- What a worker may do with a job it holds begins here: a call that was sent twice, its first reply lost, is told from one
-- that comes too late.
local id, token, job

-- Take the job up whose id is the first argument, pulled with the token behind it.
local function take_up(args)
  id, token = args[1], args[2]
  job = load(id)
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

-- The end that somebody else asked for wins over `state`. Returns it if it is another one. `used`: for the ledger.
local function ended_by_request(state, used)
  if job.ending and job.ending ~= state then
    job.used = used
    finish(id, job, job.ending, ENDED[job.ending])
    return job.ending
  end
end
