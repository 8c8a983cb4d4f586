"""The embedded example: a catalog task, a small Qwen3.5 trained on it, and the command that compares."""
