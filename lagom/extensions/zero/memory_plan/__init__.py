"""Memory planning: computes from shapes how many bytes training needs on each rank, before anything runs.

Start reading at ``needs.py``; ``plan_memory`` in ``lagom/extensions/zero/memory_plan/memory_planner.py`` is the entry.
``level_advice.py`` names a level to a rank that has run out of memory.
"""
