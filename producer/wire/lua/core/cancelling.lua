-- @include core/states
-- Returns cancelled (it was waiting, and has ended) | requested (its worker will stop it) | done | missing
local function cancel(id)
  local job = load(id)
  if not job then
    return 'missing'
  elseif not ACTIVE[job.state] then
    return 'done'
  elseif job.state ~= 'running' then
    finish(id, job, 'cancelled', CANCELLED)
    return 'cancelled'
  elseif not job.ending then
    ask_to_end(id, 'cancelled')
  end
  return 'requested'
end
