"""What a loop measures with: times, and a last step under the ledger. Begin with clock.py."""
