"""Engines that sample completions of prompts: the policy's own `generate`, and vLLM."""
