-- Return some jobs of a canary that no longer accepts jobs to the other workers. Pulls do the same in small groups.
-- KEYS[1] prefix
-- ARGV[1] model  [2] maximum number of jobs
-- Returns the number left; 0 while the canary accepts jobs
-- @include core/states
-- @include features/rollouts
local rollout = rollouts.of(ARGV[1])
if not rollout or rollouts.is_taking(rollout, ARGV[1]) then
  return 0
end
return rollouts.move_back(rollout, math.min(250, tonumber(ARGV[2])))
