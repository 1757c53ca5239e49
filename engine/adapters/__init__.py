"""LoRA adapters: what their folders hold, where they belong in a model, and which of them are in memory."""
