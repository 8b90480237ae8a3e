"""OVAL beside methods that evict; see README.md in this folder for the two environments that takes."""
