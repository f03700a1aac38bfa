"""A trace: everything that a step allocates and computes, recorded on tensors without memory (fake tensors).

Begin with tracer.py; events.py is what it records, fake.py the mode in which it runs.
"""
