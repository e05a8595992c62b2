"""Rollout: an engine that answers prompts with the policy's current weights."""
