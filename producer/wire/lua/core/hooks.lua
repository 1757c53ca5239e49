-- What features do with jobs: functions in these lists, by the time they are called. A feature's file has a section for each
-- place where its functions are needed, which begins with a line `-- @hook <place>`. A line `-- @hooks <place>` includes
-- those of all features.
-- Place on_submit:
local on_check = {} -- (job): whether its header makes sense
local on_refuse = {} -- (job, jobs, words): the word for a job that is not to be stored, or nil
local on_submit = {} -- (job, batch, rank): a job is about to be stored; may change its lane, or let it wait for others by `waits`
local after_submit = {} -- (tenants, reply): all jobs are stored; may add lines to the reply
-- Place on_pull:
local given = {'crashes', 'deadline', 'lost_by', 'fingerprint'} -- fields of a job that a worker gets with it
local on_pull = {} -- (names): returns those of the names to pull from
local may_start = {} -- (job, lane, cost): a function that takes the lane out of the turns if the job is not to start, or nil
local on_start = {} -- (id, job, lane, cost): a job is given to a worker
local on_limited = {} -- (ms): the queue's rate limit lets no job start for so long
local on_due = {} -- (ms): returns in how many ms a pull may find more, or -1
-- Place on_end:
local on_leave = {} -- (id, job): a delayed job does not wait any more
local on_stop = {} -- (id, job): a job runs no more, whatever becomes of it; perhaps called twice
local on_return = {} -- (id, job): a job comes back to wait; may change its lane
local on_failure = {} -- (id, job, kind, code): an execution was retried, with the code of its error, or crashed
local on_end = {} -- (id, job, state, out): a job ends; `out` is its result or error, or nil where others share it
local after_end = {} -- the same, once all of its end is written
local on_flush = {} -- (): the call is over: write what was gathered for several jobs
-- Place on_sweep:
local on_sweep = {} -- (limit): the clock runs
-- Place on_purge:
local on_purge = {} -- (id, job): a job is removed for good

local function call_all(hooks, ...)
  for _, hook in ipairs(hooks) do
    hook(...)
  end
end
