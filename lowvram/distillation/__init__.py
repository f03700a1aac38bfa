"""task=distill and mode=teach: a student learns from a teacher, or from a cache of what the teacher has said.

Begin with task.py. It may import everything below `planning`; nothing imports it, as YAMLs name its classes.
"""
