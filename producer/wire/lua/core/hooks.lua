-- Hooks of features: by the time these lists are used, features have added their functions. A feature's file has a
-- section per place, which starts with a line `-- @hook <place>`. A line `-- @hooks <place>` includes the sections of
-- all features. Place on_submit:
local on_check = {} -- (job): whether its header is valid
local on_refuse = {} -- (job, jobs, words): the reply word for a job that must not be stored, or nil
local on_submit = {} -- (job, batch, rank): a job is about to be stored; may change its lane and its `waits`
local after_submit = {} -- (tenants, reply): all jobs are stored; may add lines to the reply
-- Place on_pull:
local given = {'crashes', 'deadline', 'lost_by', 'fingerprint'} -- fields of a job that its worker receives
local on_pull = {} -- (names): returns those of the names to pull from
local may_start = {} -- (job, lane, cost): a function that parks the lane if the job must not start, or nil
local on_start = {} -- (id, job, lane, cost): a job is given to a worker
local on_limited = {} -- (ms): the queue's rate limit lets no job start for that long
local on_due = {} -- (ms): returns in how many ms a pull may find more jobs, or -1
-- Place on_end:
local on_leave = {} -- (id, job): a delayed job stops waiting
local on_stop = {} -- (id, job): a job stops running, for any reason; may be called twice
local on_return = {} -- (id, job): a job is queued again; may change its lane
local on_failure = {} -- (id, job, kind, code): an execution was retried, with the code of its error, or crashed
local on_end = {} -- (id, job, state, out): a job ends; `out` is its result or error, or nil if duplicates share it
local after_end = {} -- the same, after all of its end is written
local on_flush = {} -- (): the end of the call: write what was collected for several jobs
-- Place on_sweep:
local on_sweep = {} -- (limit): called by each sweep
-- Place on_purge:
local on_purge = {} -- (id, job): a job is removed permanently

local function call_all(hooks, ...)
  for _, hook in ipairs(hooks) do
    hook(...)
  end
end
