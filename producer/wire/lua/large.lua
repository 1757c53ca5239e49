local LARGE = 16384

-- A result that may be let go of early (relief.lua): no batch holds it, no notice of it is owed, nobody asked to keep it.
local function note_large(id, job, out)
  if #out >= LARGE and not (job.batch or job.webhook or job.relay or job.keep) then
    redis.call('ZADD', P .. 'large', #out, id)
  end
end
