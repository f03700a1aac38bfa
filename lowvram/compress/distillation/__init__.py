"""task=distill and mode=teach: a student learns from a teacher, or from a cache of what the teacher has said.

Begin with task.py. The configuration names its classes, so no task below imports it.
"""
