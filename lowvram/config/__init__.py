"""From YAML to typed, frozen values, and what is known of the configuration as a whole. Imports no torch.

Begin with settings.py (the root's keys) and schema.py (`build`: a YAML node -> a dataclass).
"""
