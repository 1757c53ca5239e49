"""Operating a rollout from a producer."""
