-- Tokens of a job from a position on: the checkpoint is the feed.
-- KEYS[1] prefix
-- ARGV[1] id  [2] epoch last seen  [3] entries seen  [4] entries at most
-- Returns {state or '', epoch, attempt, entries, outcome if it has ended, the job whose end it is or ''}. Another epoch than the one asked for
--   means that the job began again from its prompt: the entries then count from 0.
-- @include feeding
return feed(ARGV)
