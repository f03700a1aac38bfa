"""What a loop measures: times, disturbances, and memory in a last step under the ledger. Begin with clock.py and
post_run.py.
"""
