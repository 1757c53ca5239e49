-- The header fields of a submission, with the maximum length of strings and the maximum of numbers; no number is below
-- 0, and NaN fails every comparison. Features add fields.
local LONGEST = {
  id = 64, lane = 640, affinity = 32, twin = 128, key = 1024, idem = 1100, digest = 64, replay_of = 64,
  webhook = 2048, relay = 32, metadata = 22528, invalid = 16384, waiters = 32, stored = 1024, api_key = 64, work = 64
}
local LARGEST = {
  cost = 1e15, delay = 1e12, ttl = 1e12, run_at = 1e15, deadline = 1e15, max_attempts = 100, n = 128, width = 128,
  stream = 1, keep = 1, uncounted = 1
}
-- Fields that are also stored in the job's record if the header has them.
local is_optional = {}
local function keep_fields(names)
  for name in string.gmatch(names, '%S+') do
    is_optional[name] = true
  end
end
keep_fields('max_attempts n width stream keep webhook relay affinity twin leader key idem digest replay_of waiters stored waits '
  .. 'side api_key uncounted work')
