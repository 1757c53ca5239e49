-- End a running job: result, state, counters, feed, hint and lease in one step.
-- KEYS[1] prefix
-- ARGV[1] id  [2] token  [3] terminal state  [4] the result (succeeded) or the error (any other), as JSON
-- ARGV[5] the last progress, as in checkpoint.lua, or '': what a status says then agrees with the result
-- ARGV[6] the URI of the result, if ARGV[4] is its stub; else ''
-- ARGV[7] what the ledger counts: `<prompt tokens> <of them cached> <generated tokens> <ms of the device>`, or ''
-- Returns committed | already_done (this very commit came before) | fenced (nothing written)
--   | cancelled | expired (that end had been asked for, and came first)
-- @include committing
return commit(ARGV)
