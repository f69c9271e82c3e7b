"""What training takes of a device's memory, told from shapes before anything runs."""

from lagom.memory.needs import Level, MemoryPlan
from lagom.memory.planned import plan_memory

__all__ = ["Level", "MemoryPlan", "plan_memory"]
