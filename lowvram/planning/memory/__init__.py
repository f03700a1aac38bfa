"""PyTorch's caching allocator, simulated: which bytes it reserves for a sequence of allocations. Imports no torch.

Begin with allocator.py; overheads.py lists the memory that belongs to no tensor.
"""
