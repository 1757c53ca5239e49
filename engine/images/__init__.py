"""Pictures in prompts, decoded and prepared for a model's encoder in a process with limits."""
