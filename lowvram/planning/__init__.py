"""mode=plan: predicts a point's memory and speed without running it.

client.py runs in the parent (no torch). worker.py makes plans in a child: trace/ records a step on tensors without
memory, scaling.py computes the traces of other batch sizes, memory/ replays the allocations, time/ adds up the times of
the operators, and estimate.py puts memory and time together.
"""
