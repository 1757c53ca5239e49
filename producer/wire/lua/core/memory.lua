-- Free memory of the server. Submissions stop at a share of its maxmemory; the rest is for running jobs.
local MEMORY_SHARE = 0.85

-- {used, most}, in bytes, without memory that the server itself does not count; nil if there is no maxmemory, or the
-- server does not report it.
local function read_memory()
  local info = redis.pcall('INFO', 'memory')
  local most = type(info) == 'string' and tonumber(string.match(info, '\nmaxmemory:(%d+)') or 0) or 0
  if most > 0 then
    local used = tonumber(string.match(info, '\nused_memory:(%d+)') or 0)
    return {used - tonumber(string.match(info, 'mem_not_counted_for_evict:(%d+)') or 0), most}
  end
end
