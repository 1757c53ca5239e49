-- Whether the script was called about one job alone.
local is_alone = tonumber(ARGV[1]) + 1 == #ARGV

-- Call `one` with the arguments of each job, before which stands how many they are. Returns the replies to the first of
-- them: one that fails, or for which `has_room` has none, and those behind it are to be sent by themselves. Then its error
-- is the script's.
local function each(one, has_room)
  if is_alone then
    return {one({unpack(ARGV, 2)})}
  end
  local replies, at = {}, 1
  while at <= #ARGV and (not has_room or has_room()) do
    local count = tonumber(ARGV[at])
    local is_well, reply = pcall(one, {unpack(ARGV, at + 1, at + count)})
    if not is_well then
      break
    end
    replies[#replies + 1] = reply
    at = at + count + 1
  end
  return replies
end
