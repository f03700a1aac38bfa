"""Predicts the time of a step: the work of each operator, by the rates of its family on the device.

Begin with roofline.py; calibration.py keeps rates that microbench.py has measured on a device of this machine.
"""
