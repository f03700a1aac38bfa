"""How a point runs: a small fork server has torch imported, and gives each point a fresh child in milliseconds."""
