"""What every training here shares (`state`, `texts`), and that of learned routers: `python -m oval_core.training`."""
