"""A plug-in for lowvram, as anybody may write one: an optimizer, and a group of its own. docs/plugins.md shows it."""
