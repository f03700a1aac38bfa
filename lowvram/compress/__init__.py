"""What makes models smaller: pruning (mode=prune, and the group sparsity), growing, rounding while training (the group
qat), distillation, and exports in formats of few bits and as graphs.

A plug-in that we ship: YAMLs name its classes, loops/export/folder.py finds its formats by their names, and nothing
imports it. Imports loops and what lies below. Begin with qat.py, a knob, or prune.py, a mode.
"""
