-- Remove jobs of a tenant with all their data; ids of other tenants' jobs are skipped.
-- KEYS[1] prefix
-- ARGV[1] tenant  [2] 1: also running jobs, whose workers are fenced from then on; 0: these are cancelled
--   [3] and on: ids
-- Returns names and values: gone (ids removed), running (ids of jobs that run), left (ids left for the next call)
-- @include core/states
-- @include purging
for i = 3, #ARGV do
  local job = load(ARGV[i])
  if job and tenant_of(job) == ARGV[1] then
    remove(ARGV[i], job, ARGV[2] == '1')
  end
end
return {'gone', gone, 'running', running, 'left', left}
