"""mode=plan: what a point would hold and how fast it would be, without running it.

client.py is the parent's (no torch). worker.py plans: trace/ records a step on tensors without memory, scaling.py makes
a trace of another batch size of it, memory/ replays its allocations, time/ adds up what its operators take, and
estimate.py puts memory and time together.
"""
