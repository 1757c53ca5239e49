-- Remove jobs of a tenant from a part of a batch. The places of removed jobs stay, empty, so that readers' positions in
-- the batch do not shift. A duplicate may have been removed with its primary job before; ids that a reader has freed
-- (`backed:<batch>`) are kept.
-- KEYS[1] prefix
-- ARGV[1] tenant  [2] 1: also jobs that run  [3] batch id  [4] position to start from  [5] jobs to read
--   [6] 1: every job of the batch is the tenant's, including invalid rows
-- Returns names and values as `purge_jobs`, and looked (jobs read)
-- @include core/states
-- @include purging
local key, from = P .. 'bjobs:' .. ARGV[3], tonumber(ARGV[4])
local ids = redis.call('LRANGE', key, from, from + ARGV[5] - 1)
for i, id in ipairs(ids) do
  local job = id ~= '' and load(id)
  local is_gone = id ~= '' and not job and redis.call('SISMEMBER', P .. 'backed:' .. ARGV[3], id) == 0
  if is_gone or (job and (tenant_of(job) == ARGV[1] or ARGV[6] == '1') and remove(id, job, ARGV[2] == '1')) then
    redis.call('LSET', key, from + i - 1, '')
  end
end
return {'looked', #ids, 'gone', gone, 'running', running, 'left', left}
