-- `checkpoint` for several jobs, each by itself.
-- KEYS[1] prefix
-- ARGV per job how many arguments follow, and those of `checkpoint`
-- Returns per job what `checkpoint` does
-- @include checkpointing
-- @include each
local replies = each(checkpoint)
tell()
return replies
