"""Runnable demonstrations of OVAL; each module is started with `python -m demos.<name>`."""
