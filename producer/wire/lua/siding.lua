-- @include sides
-- Which jobs a worker takes while its model is rolled out. Only pull includes it. `sides.bells`: what the worker is to
-- listen for; nil: all that it serves.
do
  -- By the last part of a lane, without `~`: the worker's side there, and whether jobs of the other side are left to others.
  local here, here_by_lane = {}, {}

  -- The names to pull from, of those that the worker serves.
  function sides.sided_names(names)
    if redis.call('EXISTS', P .. 'rollouts') == 0 then
      return names
    end
    local served, found, bells = {}, {}, {}
    for _, name in ipairs(names) do
      served[name] = true
    end
    for _, name in ipairs(names) do
      local rollout = not string.find(name, '~', 1, true) and sides.rollout_of(name)
      local is_canary = rollout and served[name .. '~' .. rollout.to] or false
      local takes_canary, takes_stable = false, true
      if rollout then
        local canaries = sides.live_workers(name .. '~' .. rollout.to)
        local others = is_canary and sides.live_workers(name) - canaries or canaries
        local is_alone = rollout.state ~= 'open' or others <= 0
        local is_barred = is_canary and (rollout.state == 'halted' or rollout.state == 'back')
        takes_canary = not is_barred and (is_canary or is_alone)
        takes_stable = not is_barred and (not is_canary or is_alone)
        here[name] = {side = is_canary and 'canary' or 'stable', is_alone = is_alone, is_over = rollout.state == 'ended' or rollout.state == 'back'}
        sides.bells = bells
      end
      if takes_stable then
        found[#found + 1] = name
        bells[#bells + 1] = name
      end
      if takes_canary then
        found[#found + 1] = name .. '~'
      end
    end
    return found
  end

  function sides.here_of(lane)
    if here_by_lane[lane] == nil then
      local _, _, _, name = split_lane(lane)
      here_by_lane[lane] = here[(string.gsub(name, '~$', ''))] or false
    end
    return here_by_lane[lane]
  end

  -- Leave a job to the workers of the other side, if it is theirs. It keeps its rank.
  function sides.left_to_others(lane, name, rank, id, job)
    local place = sides.here_of(lane)
    local side = place and not place.is_alone and sides.side_of(id, job)
    if not side or side == place.side then
      return false
    end
    local _, affinity = split_member(name)
    local other = waiting_lane(sides.sided_lane(job.lane, side), job.crashes)
    redis.call('ZREM', P .. 'wait:' .. lane, name)
    remove_alike(lane, affinity, rank)
    redis.call('ZADD', P .. 'wait:' .. other, rank, name)
    add_alike(other, affinity, rank)
    open_lane(other)
    sides.lane_for(id, job)
    return true
  end
end
