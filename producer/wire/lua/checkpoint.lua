-- Append what a job generated, and say how far it is. Fenced, append-only, all or nothing.
-- KEYS[1] prefix
-- ARGV[1] id  [2] token  [3] progress `<phase> <prompt done> <prompt> <generated> <max>`  [4] fingerprint or ''
-- ARGV[5] 1: drop the checkpoint first; then per delta: sample index, offset, number of tokens, entry
-- Returns ok | cancelled (written, but stop the job) | stale | bad_offset (nothing written)
-- @include checkpointing
local reply = checkpoint(ARGV)
tell()
return reply
