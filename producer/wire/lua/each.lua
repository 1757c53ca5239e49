-- Call `one` with the arguments of each of several calls, before which stands how many they are; returns its replies.
local function each(one)
  local replies, at = {}, 1
  while at <= #ARGV do
    local args, count = {}, tonumber(ARGV[at])
    for i = 1, count do
      args[i] = ARGV[at + i]
    end
    replies[#replies + 1] = one(args)
    at = at + count + 1
  end
  return replies
end
