"""Turns the configuration from YAML into typed, frozen values, and describes it as a whole. Imports no torch.

Begin with settings.py (the root's keys) and schema.py (`build`: a YAML node -> a dataclass).
"""
