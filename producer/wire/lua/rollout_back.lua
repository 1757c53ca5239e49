-- Move some jobs of a canary that takes none any more back to the other workers. Pulls do the same, a few at a time.
-- KEYS[1] prefix
-- ARGV[1] model  [2] jobs at most
-- Returns how many are left; 0 while the canary takes jobs
-- @include core/states
-- @include features/rollouts
local rollout = rollouts.of(ARGV[1])
if not rollout or rollouts.is_taking(rollout, ARGV[1]) then
  return 0
end
return rollouts.move_back(rollout, math.min(250, tonumber(ARGV[2])))
