"""The engines that are compared, each in a process of its own."""
