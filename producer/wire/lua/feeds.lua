-- `feed` for several jobs.
-- KEYS[1] prefix
-- ARGV per job how many arguments follow, and those of `feed`
-- Returns per job what `feed` does
-- @include feeding
-- @include each
return each(feed)
