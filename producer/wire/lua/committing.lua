-- @include fenced
-- @include keeping
-- What commit.lua returns for these arguments of its.
local function commit(args)
  take_up(args)
  local state, stored = args[3], args[6]
  local word = refusal() or ended_by_request(state, args[7])
  if word then
    return word
  end
  if args[5] ~= '' then
    job.progress, job.progress_at = args[5], NOW_TEXT
  end
  if (stored or '') ~= '' then
    redis.call('ZREM', P .. 'stored', stored)
    job.stored_result = stored
  end
  job.used = args[7]
  finish(id, job, state, args[4])
  if job.promise and state == 'succeeded' then
    note_kept(job)
  end
  return 'committed'
end
