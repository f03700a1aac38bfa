"""How long a step takes: the work of each operator, by the rates of its class on the device.

Begin with roofline.py; calibration.py keeps rates that microbench.py has measured on a device of this machine.
"""
